"""A Ray cluster of several nodes in this machine: `python ray_nodes.py COUNT`. A program of its own, as Ray changes the one it is in.

Prints its address, kills a node for each line of standard input, and ends with it. Nothing of it asks the network.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1"}
# On a slow machine a node may take long to answer, and a worker to begin; one that was killed refuses connections at once.
os.environ |= {"RAY_health_check_timeout_ms": "120000", "RAY_worker_register_timeout_seconds": "600"}

from ray.cluster_utils import Cluster  # noqa: E402

NODE = {"object_store_memory": 100 << 20, "include_log_monitor": False}
"""Nobody reads the logs of its workers."""


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "no_monitor": True, **NODE},
        shutdown_at_exit=True,
    )
    nodes = [cluster.add_node(num_cpus=1, **NODE) for _ in range(int(sys.argv[1]))]
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
