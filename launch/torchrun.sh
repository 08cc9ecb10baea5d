#!/usr/bin/env bash
# One host of a job of several, or the only one:
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 RANKS_PER_NODE=8 bash launch/torchrun.sh recipe.yaml --output runs/a
# Start it on each host with its own NODE_RANK. On hosts with several networks set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.
set -euo pipefail

: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}" "${RANKS_PER_NODE:=1}"

# torchrun takes --nproc for its own: the number of ranks expected goes through the recipe's key.
exec torchrun \
  --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$RANKS_PER_NODE" \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
  -m shardlab train "$@" --set "shard.world_size=$((NODES * RANKS_PER_NODE))"
