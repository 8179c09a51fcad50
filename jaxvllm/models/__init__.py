"""Models as pure functions over a table of parameters; local shapes, no mesh, no config parsing."""
