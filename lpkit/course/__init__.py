"""The course without a browser: notebooks with parameters, exercises and their judge, the lab."""
