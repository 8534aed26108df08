"""Going on from the leading schemes: better parameters, found on some documents and judged on
others."""
