# ktbridge in a slim image, as a user without privileges: docker build -t ktbridge .
#
#   docker run --rm -v "$PWD:/work" ktbridge validate my-adapter
#   docker build -t ktbridge-train --build-arg EXTRAS=all .      training, serving and evaluating on CPUs, 2 GB more
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
ARG EXTRAS=eval,hub
COPY --from=build /wheels /wheels
COPY constraints-cpu.txt constraints-tested.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints-cpu.txt -c /wheels/constraints-tested.txt \
        "$(echo /wheels/ktbridge-*.whl)[$EXTRAS]" \
    && rm -r /wheels && useradd --create-home --uid 1000 ktbridge
USER ktbridge
WORKDIR /work
ENTRYPOINT ["ktbridge"]
