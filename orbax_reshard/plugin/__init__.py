"""The doors to Orbax: a type handler, its registration, one file of privates."""
