"""The other frameworks, each in a process of its own."""
