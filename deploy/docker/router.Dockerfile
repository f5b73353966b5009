# Placement of generation requests. No torch.
# Build from the repository's root: docker build -f deploy/docker/router.Dockerfile -t paceline/router .
FROM python:3.11-slim AS build
# More options for pip: another index, a folder of wheels, a torch build without CUDA.
ARG PIP_OPTIONS=""
WORKDIR /build
RUN python -m venv /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml constraints.txt README.md LICENSE ./
# The dependencies first, in a layer that a change of the code does not touch.
RUN mkdir -p src/paceline services \
    && touch src/paceline/__init__.py services/__init__.py \
    && pip install $PIP_OPTIONS -c constraints.txt ".[router]"
COPY src src
COPY services services
RUN pip install $PIP_OPTIONS --no-deps --force-reinstall .

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home --home-dir /var/lib/paceline --shell /usr/sbin/nologin paceline
COPY --from=build /opt/paceline /opt/paceline
# A project's own modules are found by import path; they must not stand before the installed packages.
ENV PATH=/opt/paceline/bin:$PATH HOME=/tmp PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
USER 10001
WORKDIR /project
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "paceline.rpc.healthcheck", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m", "services.router"]
