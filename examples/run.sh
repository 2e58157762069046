#!/usr/bin/env bash
# The demonstration behind `make run`: start the simulated engine, send it the example requests, stop it.
# Run it again and it finds the work done. The results and the data lie in .tidegate-demo; remove it to start afresh.
set -euo pipefail
cd "$(dirname "$0")/.."

demo=.tidegate-demo
mkdir -p "$demo"

# The same input, upstream and options are the same work, so the engine must keep its address from run to run.
# The port is chosen once, among those that are free, and remembered.
if [ ! -s "$demo/port" ]; then
    python - > "$demo/port.partial" <<'PORT'
import socket
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    print(probe.getsockname()[1])
PORT
    mv "$demo/port.partial" "$demo/port"
fi
port=$(cat "$demo/port")

tidegate simulate --port "$port" --mode fixed --latency-ms 100 > "$demo/engine.log" 2>&1 &
engine=$!
trap 'kill "$engine" 2> /dev/null || true; wait "$engine" 2> /dev/null || true' EXIT

for _ in $(seq 200); do
    grep -q "simulated engine listening" "$demo/engine.log" && break
    if ! kill -0 "$engine" 2> /dev/null; then
        cat "$demo/engine.log" >&2
        echo "the simulated engine did not start on port $port; remove $demo/port to choose another" >&2
        exit 1
    fi
    sleep 0.05
done

tidegate run examples/requests.jsonl \
    --upstream "http://127.0.0.1:$port/v1" \
    --data "$demo/data" \
    -o "$demo/results.jsonl"
