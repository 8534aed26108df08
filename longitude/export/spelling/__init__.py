"""A scheme in the words of a runtime: one small file a runtime, each with the ways it has to say
it, the best first. The first that the runtime's own formulas make the scheme of is taken."""

from longitude.export.spelling.choose import RUNTIMES as RUNTIMES
from longitude.export.spelling.choose import nearest_served as nearest_served
from longitude.export.spelling.choose import spell as spell
from longitude.export.spelling.value import Model as Model
from longitude.export.spelling.value import Spelling as Spelling
