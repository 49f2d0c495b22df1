#!/bin/sh
# Multiprocess mode by hand: LMCache's own server beside vLLM. `lmcache-cartridge serve MODEL --mode multiprocess` does
# the same and ends both together; with `--print` it shows these commands for your paths.
#
# Proven with vLLM 0.32.0 (CPU) and LMCache 0.5.6. Set the four variables, then run the two commands in two terminals.

MODEL=./llama
HOME_DIR=$HOME/.local/share/lmcache-cartridge          # where `lmcache-cartridge build` registers cartridges
CONTROL=/tmp/lmcache-cartridge-$(id -u)/5755.sock      # a Unix socket in a directory that only you may write to
YAML=configs/lmcache.yaml                              # vLLM's API server reads the cartridge settings there

# 1. LMCache's server. What each option is for:
#   --chunk-size                   a multiple of vLLM's block (128 on CPU)
#   --supported-transfer-mode      engine_driven on CPU; leave it away on GPUs. With the wrong one vLLM waits five
#                                  minutes and gives up
#   --no-l1-use-lazy, --shm-name   vLLM maps LMCache's memory instead of having chunks sent. CPU only
#   --l1-size-gb                   for what LMCache saves, and for its copies of cartridges: it copies a whole prefix or
#                                  serves none of it, so several times the largest
#   --eviction-trigger-watermark   LMCache looks once a second whether it is fuller, and refuses what has no room until
#                                  then: leave room for two of the largest cartridges. --eviction-ratio goes at once
#   --l2-prefetch-policy retain    keep it there for the next request
#   --worker-reap-timeout-seconds  0: else a vLLM that gets no request for an hour is forgotten for good
#   --hash-algorithm               leave it away: the default, blake3, has no seed; with another vLLM does not start
#   --http-port                    as in `lmcache_http`, by which evicting a cartridge drops LMCache's copies too
#   adapter_params                 `control`, and the same settings as in the YAML; `store_ack: false` beside
#                                  --l2-store-policy skip_l1, which drops what an adapter says it has stored
LMCACHE_TRACK_USAGE=false lmcache server --host 127.0.0.1 --port 5755 --http-port 8755 --chunk-size 256 \
  --supported-transfer-mode engine_driven --no-l1-use-lazy --shm-name lmcache-cartridge-5755 \
  --l1-size-gb 1 --eviction-policy LRU --eviction-trigger-watermark 0.8 --eviction-ratio 0.3 \
  --l2-prefetch-policy retain --worker-reap-timeout-seconds 0 \
  --l2-adapter '{"type": "plugin", "module_path": "lmcache_cartridge.engine.l2", "class_name": "CartridgeL2Adapter",
                 "adapter_params": {"control": "'"$CONTROL"'", "lmcache_http": "http://127.0.0.1:8755",
                                    "home": "'"$HOME_DIR"'"}}' &

# 2. vLLM, as soon as the other has started. With "kv_role": "kv_consumer" LMCache saves nothing of what it computes.
#    `kv_load_failure_policy` must be fail where trained cartridges are served.
#    `--disable-hybrid-kv-cache-manager` keeps the KV of full and sliding layers in equal blocks; without it models of both
#    are refused here (docs/compatibility.md). It changes nothing for others. Where every layer has a window, `kv_role` must be kv_consumer.
#    With GPU wheels: `vllm serve "$MODEL"` in the place of `python -m ... --model "$MODEL"`.
VLLM_PLUGINS=cartridges LMCACHE_CONFIG_FILE=$YAML VLLM_NO_USAGE_STATS=1 \
python -m vllm.entrypoints.launchers.api_server.entry --model "$MODEL" --enable-prompt-tokens-details \
  --kv-cache-memory-bytes 1073741824 --disable-hybrid-kv-cache-manager \
  --kv-transfer-config '{"kv_connector": "CartridgeMPConnector",
    "kv_connector_module_path": "lmcache_cartridge.engine.mp_connector",
    "kv_role": "kv_both", "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5755,
                                  "cartridge.control": "'"$CONTROL"'"}}'
