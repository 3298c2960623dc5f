"""Test whether X is better than Y. A YAML file fixes the comparison before the first run
(`protocol`); `runs` trains the models; `settle` plans the runs, and `referee` has the statistics of
the verdict: the measured difference, and the smallest difference that the test could detect."""
