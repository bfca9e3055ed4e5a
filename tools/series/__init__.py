"""The series of commits for upstream: the form that each file has in each of them."""
