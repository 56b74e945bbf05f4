"""A real single-node Kubernetes on this machine, and the tests that need one."""
