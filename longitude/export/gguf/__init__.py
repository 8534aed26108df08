"""A GGUF file under another scheme: which keys and tensors say it, and a copy that holds them."""

from longitude.export.gguf.export import export_gguf as export_gguf
from longitude.export.gguf.rewrite import rewrite as rewrite
from longitude.export.gguf.settings import Settings as Settings
from longitude.export.gguf.settings import settings as settings
