"""Tests of longitude/inspect. A package tests/inspect would hide Python's own module of that name
from processes that are started with pytest's path."""
