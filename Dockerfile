# syntax=docker/dockerfile:1
#
# The production image: Triton with the engine, the client and the model repository.
#
#   docker build --tag paged-engine .
#   docker run --rm --gpus all --shm-size=1g --ulimit memlock=-1 --ulimit nofile=65536 \
#       -p 8000:8000 -p 8001:8001 -p 8002:8002 -v /path/to/checkpoint:/checkpoint:ro -e MODEL=/checkpoint paged-engine
#
# --shm-size: each request's tensors go through /dev/shm, of which a container has 64 MB unless told otherwise; the pool
# only grows. --ulimit memlock: pinned memory. --ulimit nofile: a stream is a connection. Stopping takes as long as the
# longest request (docker stop --time). -e PARAMETERS="max_batch_size=256 page_size=32" overrides config.pbtxt's
# parameters; -v /path/to/repository:/models:ro brings a model repository of one's own.
#
# Build arguments:
#   DEVICE=cpu                    an image for machines without a GPU, several GB smaller; with
#   TORCH_INDEX_URL=...           an index of CPU builds of torch
#   FLASHINFER_CUDA_ARCH_LIST     compute capabilities to compile kernels for; only one's own is much quicker
#   KERNEL_DTYPES, KERNEL_HEAD_DIMS    dtypes and head sizes of models to compile them for
#   KERNEL_OPTIONS=--float8-cache compiles them for pages in float8, too (kv_cache_dtype=float8_e4m3fn)
# What is not compiled here is served by plain torch, many times slower, which the log says when a model is loaded: there
# is no compiler in the image.

ARG BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.09-py3
ARG DEVICE=gpu

# ---- The packages, in a virtual environment of the Python that Triton's stub embeds ----

FROM ${BASE_IMAGE} AS packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/paged-engine \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_CONSTRAINT=/src/engine_pkg/constraints.txt
WORKDIR /src
COPY engine_pkg/constraints.txt engine_pkg/constraints.txt
RUN python3 -m venv --without-pip "$VIRTUAL_ENV" \
    && python3 -m pip --python "$VIRTUAL_ENV/bin/python3" install pip setuptools
ARG TORCH_INDEX_URL=""
RUN "$VIRTUAL_ENV/bin/pip" install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
ARG NUMPY_VERSION=2.3.5
COPY engine_pkg engine_pkg
COPY client client
RUN "$VIRTUAL_ENV/bin/pip" install --no-build-isolation "numpy==$NUMPY_VERSION" "./engine_pkg[tools]" "./client[cli]" \
    && "$VIRTUAL_ENV/bin/python3" -c "from paged_engine.kernels import build; build.build(build.INSTALLED / build.library_name())"

FROM packages AS packages-cpu

# ---- For GPUs: FlashInfer, with its kernels compiled ahead by a toolkit that stays behind ----

FROM packages AS packages-gpu
ARG FLASHINFER_VERSION=0.7.4
RUN "$VIRTUAL_ENV/bin/pip" install "flashinfer-python==$FLASHINFER_VERSION"
ENV CUDA_HOME=/opt/cuda-toolkit/nvidia/cu13
# The release that this torch is built with; cublas is for headers that the norms include. Its packages have no names
# without version numbers to link with, and libcuda is the driver's: an empty one of its name will do for linking.
ARG CUDA_TOOLKIT_VERSION=13.0.3
RUN "$VIRTUAL_ENV/bin/pip" install --target /opt/cuda-toolkit "cuda-toolkit[nvcc,cudart,cccl,cublas,curand]==$CUDA_TOOLKIT_VERSION" \
    && ln -s libcudart.so.13 "$CUDA_HOME/lib/libcudart.so" \
    && mkdir "$CUDA_HOME/lib/stubs" \
    && g++ -shared -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/stubs/libcuda.so" -x c++ /dev/null \
    && ln -s lib "$CUDA_HOME/lib64"
ARG FLASHINFER_CUDA_ARCH_LIST="8.0 8.9 9.0 10.0 12.0"
ARG KERNEL_DTYPES="bfloat16 float16"
ARG KERNEL_HEAD_DIMS="64 128 256"
ARG KERNEL_OPTIONS=""
# hadolint ignore=SC2086
RUN PATH="$VIRTUAL_ENV/bin:$PATH" python3 -m paged_engine.attention.flashinfer_kernels \
        --dtypes $KERNEL_DTYPES --head-dims $KERNEL_HEAD_DIMS $KERNEL_OPTIONS

# hadolint ignore=DL3006
FROM packages-${DEVICE} AS packages-of-device

# ---- The image ----

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 serve \
    && useradd --uid 10001 --gid serve --no-log-init --no-create-home --home-dir /cache serve \
    && install --directory --owner serve --group serve /cache
COPY --from=packages-of-device /opt/paged-engine /opt/paged-engine
COPY model_repository /models
# FLASHINFER_USE_CUDA_NORM: the norms that were compiled ahead, in the place of those that it would compile at a first call.
ENV VIRTUAL_ENV=/opt/paged-engine \
    PATH=/opt/paged-engine/bin:$PATH \
    MODEL_REPOSITORY=/models \
    CACHE_DIR=/cache \
    HF_HOME=/cache/huggingface \
    FLASHINFER_USE_CUDA_NORM=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /cache
# Checkpoints from a hub and converted GGUF files are kept in /cache.
VOLUME ["/models", "/cache"]
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
ENTRYPOINT ["python3", "-m", "paged_engine.tools.container"]
CMD ["--exit-timeout-secs=600"]
