#!/usr/bin/env bash
# Everything that one accelerator has to show, the most important first; begins nothing
# after 12 minutes (all takes about 16), and goes on when it is started again. What, and
# with which flags, stands in accelerator.py.
#
#     benchmarks/accelerator.sh OUT_FOLDER [flags]
#
# Activate fedvi's environment first, or set PYTHON.
python=${PYTHON:-python}
if ! "$python" -c 'import fedvi' 2>/dev/null; then
  echo "error: $python has no fedvi: activate its environment, or set PYTHON=.../python" >&2
  exit 1
fi
exec "$python" "$(dirname "$0")/accelerator.py" "$@"
