# The kit on NVIDIA GPUs, for a lab and for jobs (`lpkit launch`). From the project's folder:
#
#   docker build -f binder/cuda.Dockerfile -t lpkit:cuda .
#   docker run --rm -it --network host --gpus all lpkit:cuda
#
# PyTorch's wheel for Linux brings CUDA, at the versions that it names; the driver is the machine's (NVIDIA Container Toolkit).
FROM python:3.12.12-slim-bookworm

# Triton compiles its launchers by the C compiler at hand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 learner \
    && install --directory --owner=learner --group=learner /opt/lpkit
USER 1000
WORKDIR /opt/lpkit

# By name: what else lies in the folder (.git, runs, keys) stays outside.
COPY --chown=learner:learner pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY --chown=learner:learner lpkit lpkit
COPY --chown=learner:learner notebooks notebooks
COPY --chown=learner:learner data data

ENV PATH="/home/learner/venv/bin:$PATH" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
RUN python -m venv /home/learner/venv \
    && python -m pip install --no-cache-dir -c constraints.txt -e '.[kernels,sweep]' nvidia-ml-py

WORKDIR /home/learner
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8888/api', timeout=4)"]
CMD ["lpkit", "lab", "--no-browser"]
