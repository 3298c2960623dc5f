# The course on a CPU: Binder's set-up (environment.yml, postBuild) in an image of its own. From the project's folder:
#
#   docker build -f binder/cpu.Dockerfile -t lpkit:cpu .
#   docker run --rm -it --network host lpkit:cpu            prints the lab's URL, which has its token
#
# The lab listens on 127.0.0.1, in a container too; --network host makes that this machine's.
FROM mambaorg/micromamba:2.5.0-debian12-slim

# Triton's interpreter and the CPU's kernels are compiled by the C compiler at hand.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=mambauser --group=mambauser /opt/lpkit
USER 57439
WORKDIR /opt/lpkit

# By name: what else lies in the folder (.git, runs, keys) stays outside.
COPY --chown=mambauser:mambauser pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY --chown=mambauser:mambauser lpkit lpkit
COPY --chown=mambauser:mambauser notebooks notebooks
COPY --chown=mambauser:mambauser data data
COPY --chown=mambauser:mambauser binder binder

ENV PATH="/opt/conda/bin:$PATH"
# Packages beside the kit's own, with their versions: jupyterhub==5.5.0 makes it the image of a hub.
ARG ALSO=""
RUN micromamba install --yes --name base --file binder/environment.yml \
    && micromamba clean --all --yes \
    && bash binder/postBuild \
    && if [ -n "$ALSO" ]; then python -m pip install --no-cache-dir -c constraints.txt "$ALSO"; fi

WORKDIR /home/mambauser
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8888/api', timeout=4)"]
CMD ["lpkit", "lab", "--no-browser"]
