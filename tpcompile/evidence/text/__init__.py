"""What torch prints -> fields: graphs, guards, generated code, recompile reasons."""
