#!/usr/bin/env bash
# Everything that one accelerator has to show, in at most 12 minutes; what, and with
# which flags, stands in accelerator.py.
#
#     benchmarks/accelerator.sh OUT_FOLDER [flags]
exec python "$(dirname "$0")/accelerator.py" "$@"
