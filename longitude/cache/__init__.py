"""Keys and values of past tokens under a scheme; the mask says what is kept."""

from longitude.cache.cache import Cache as Cache
from longitude.cache.cache import Kept as Kept
