"""Every public name resolves, and each command is a function."""

import longitude
from longitude.cli.main import app

LIBRARY = {"stream": "longitude.hf.stream", "bench": "python -m benchmarks", "env": "no function"}


def test_every_name_resolves() -> None:
    for name in longitude.__all__:
        assert getattr(longitude, name) is not None
    assert longitude.Mistake is longitude.UserError  # its name in 0.1


def test_every_command_is_a_function_with_options_and_a_result() -> None:
    for command in app.registered_commands:
        name = getattr(command.callback, "__name__", "")
        if name in LIBRARY:
            continue
        function = getattr(longitude, name)
        assert function.__module__.startswith("longitude.") and function.__doc__
        result = function.__annotations__["return"]
        assert "Result" in str(result) or "Report" in str(result), name
