# tachyscope serve on CPUs: docker build -t tachyscope . && docker run -p 8080:8080 -v $PWD/tokens:/tokens:ro tachyscope
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt ./
# torch alone from PyTorch's CPU index: the public index has the CUDA build
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir --no-deps --constraint constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY tachyscope tachyscope
RUN /venv/bin/pip install --no-cache-dir --constraint constraints.txt . \
    && /venv/bin/pip uninstall --yes pip

FROM python:3.11-slim-bookworm
# a number, so that Kubernetes can tell that it is not root
RUN useradd --uid 10001 --create-home tachyscope && mkdir /state && chown 10001:10001 /state
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
LABEL org.opencontainers.image.title=tachyscope org.opencontainers.image.version=0.1.0 \
      org.opencontainers.image.licenses=Apache-2.0
USER 10001
WORKDIR /home/tachyscope
VOLUME /state
EXPOSE 8080
HEALTHCHECK --start-period=60s --interval=60s CMD ["python3", "-m", "tachyscope.serve.healthcheck", "http://127.0.0.1:8080", "/tokens"]
ENTRYPOINT ["tachyscope", "serve"]
CMD ["atrium-world", "--host", "0.0.0.0", "--token-file", "/tokens", "--state", "/state"]
