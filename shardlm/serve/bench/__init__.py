"""How fast a model is served: `engine` offline, in this process; `online` over HTTP, as clients see it."""
