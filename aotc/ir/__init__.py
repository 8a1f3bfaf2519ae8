"""The two IRs, Graph and Program, with their verifiers, text forms and interpreters."""
