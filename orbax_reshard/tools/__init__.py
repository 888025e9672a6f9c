"""What people look at: the command line, the demo and the local cluster launcher."""
