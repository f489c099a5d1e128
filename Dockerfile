# tachyscope serve on CPUs: docker build -t tachyscope . && docker run -p 8080:8080 -v $PWD/tokens:/tokens:ro tachyscope
FROM python:3.12-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tachyscope tachyscope
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt '.[serve]' \
    && useradd --create-home tachyscope && mkdir /state && chown tachyscope /state
USER tachyscope
VOLUME /state
EXPOSE 8080
HEALTHCHECK --start-period=60s CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["tachyscope", "serve"]
CMD ["atrium-world", "--host", "0.0.0.0", "--token-file", "/tokens", "--state", "/state"]
