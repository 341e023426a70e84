"""The operator's file and what is done with it: targets, hosts, volumes and KV namespaces as they shall be.

Not here: SPDK's objects and the plan over them (``spdk_rpc.plan``); the commands (``kvdev_tools.cmd_provision``).
"""
