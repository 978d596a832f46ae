# mm_core and its plugins in a container: `make image`, `make image DEVICE=cpu`, `make image DEVICE=ascend`.
# tests/repo/test_image.py runs the steps of Python in an environment of its own.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# torch.compile and Triton build small programs; both need a compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# PyPI has torch for CUDA; this index has versions +cpu, which pip prefers, and torch_npu takes on x86_64 too.
ARG DEVICE=cuda
ARG TORCH=2.13.0
ARG TORCH_NPU=2.12.0
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$DEVICE" in \
      cuda) set -- "torch==$TORCH" ;; \
      cpu) set -- "torch==$TORCH" ${CPU_INDEX:+--extra-index-url "$CPU_INDEX"} ;; \
      ascend) set -- "torch_npu==$TORCH_NPU" ${CPU_INDEX:+--extra-index-url "$CPU_INDEX"} ;; \
      *) echo "DEVICE is cpu, cuda or ascend, not '$DEVICE'" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir "$@"

# The versions that mm_core is tested with, except torch, which is there already and is not replaced.
WORKDIR /opt/mm_core
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY mm_core mm_core
COPY plugins plugins
RUN sed '/^torch/d' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt '.[tensorboard,plots,parquet]' ./plugins/* \
    && rm /tmp/constraints.txt

# No ENTRYPOINT: that of CANN's images sets up CANN, and passes signals on.
WORKDIR /work
CMD ["mm", "doctor"]
