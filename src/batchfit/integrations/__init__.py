"""batchfit inside other people's trainers: one module a framework, imported only by its own path."""
