"""`shardlab doctor`: what is wrong with a machine, a file, or a pair of configurations, before a job finds out.

`examine` looks at the machine, `files` lints configuration files, `parity` runs two configurations and compares them.
Importing it imports no heavy library.
"""
