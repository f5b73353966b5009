#!/bin/sh
# The page tests need a browser. Use the one that is here, else take Debian's; elsewhere they are skipped with the reason.
set -eu
if command -v chromium >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
    echo "no chromium here; tests marked 'browser' are skipped"
fi
