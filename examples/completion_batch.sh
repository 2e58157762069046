#!/usr/bin/env bash
# One completion batch with requests of three shapes, and its events as they come. Start a server first, for example:
#   tidegate simulate & tidegate serve --upstream http://127.0.0.1:8000/v1
set -euo pipefail

url=${GATEWAY_URL:-http://127.0.0.1:8080}
workspace=${WORKSPACE:-default}
model=${MODEL:-llama-3-8b}

curl -sSN "$url/v1/completion-batch/$workspace/demo" \
    -H "Authorization: Bearer ${GATEWAY_KEY:-none}" \
    -H "Content-Type: application/json" \
    --data-binary @- <<BODY
{
  "type": "SYNC",
  "items": [
    {"resourceId": "$model", "request": {"messages": [{"role": "user", "content": "The capital of Peru?"}]}},
    {"resourceId": "$model", "request": {"input": "The capital of Chile?"}},
    {"resourceId": "$model", "request": {"system": "Be brief.", "max_tokens": 16, "messages": [{"role": "user", "content": "And of Bolivia?"}]}}
  ]
}
BODY
