#!/bin/sh
# Two local base images for deploy/docker/Dockerfile, for where no registry of images can be reached. As root:
#
#   STORE=/var/tmp/penstock-images TRITON_WHEEL=.venv-triton tests/deploy/local_base.sh
#
#   penstock-base     Debian 12 by debootstrap with its Python 3.11. It stands in for python:3.12-slim-bookworm, which
#                     has Python 3.12 under /usr/local, fewer packages, and the same Debian below.
#   penstock-tritonserver   the same with the Triton 2.51 of nvidia-pytriton laid out as NVIDIA's images lay out theirs:
#                     /opt/tritonserver/{bin,lib,backends/python}, on PATH. It stands in for
#                     nvcr.io/nvidia/tritonserver:RR.MM-py3, which is Ubuntu with Python 3.10 or 3.12 and has CUDA,
#                     TensorRT, more backends (onnxruntime among them), and an entry point of its own: none of these here.
#
# STORE holds buildah's storage (STORAGE_DRIVER: vfs, which works everywhere, or overlay, which takes a fifth of the room) and nothing else: remove the folder, and all of it is gone. This machine's pip
# configuration and certificates go into both, so that what is built on them finds its packages as this machine does;
# such images are for trying out, not for shipping.
set -eu

: "${STORE:?say where the images go: STORE=/var/tmp/penstock-images}"
: "${TRITON_WHEEL:?say where the environment with nvidia-pytriton is: TRITON_WHEEL=.venv-triton}"

buildah() { command buildah --root "$STORE/root" --runroot "$STORE/run" --storage-driver "${STORAGE_DRIVER:-vfs}" "$@"; }

make_root() { # $1: folder
    rm -rf "$1"
    debootstrap --variant=minbase --include=python3,python3-venv,libpython3.11,ca-certificates,curl bookworm "$1"
    rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/*
    cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"
    if [ -f /etc/pip.conf ]; then cp /etc/pip.conf "$1/etc/pip.conf"; fi
}

lay_out_triton() { # $1: folder. The wheel's files where NVIDIA's images have theirs.
    packages=$TRITON_WHEEL/lib/python3.11/site-packages
    wheel=$packages/pytriton/tritonserver
    mkdir -p "$1/bin" "$1/backends/python"
    cp "$wheel/bin/tritonserver" "$1/bin/"
    chmod 755 "$1/bin/tritonserver"
    cp -r "$packages/nvidia_pytriton.libs" "$1/lib"
    cp "$wheel"/backends/python/libtriton_python.so "$wheel"/backends/python/triton_python_backend_utils.py \
        "$wheel"/python_backend_stubs/3.11/triton_python_backend_stub "$1/backends/python/"
    chmod 755 "$1/backends/python/triton_python_backend_stub"
}

commit() { # $1: folder, $2: name, rest: options of `buildah config`
    folder=$1 name=$2
    shift 2
    container=$(buildah from scratch)
    buildah add -q "$container" "$folder" / >/dev/null
    buildah config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        "$@" "$container"
    buildah commit -q --rm "$container" "$name"
}

mkdir -p "$STORE"
make_root "$STORE/rootfs"
commit "$STORE/rootfs" localhost/penstock-base
lay_out_triton "$STORE/rootfs/opt/tritonserver"
commit "$STORE/rootfs" localhost/penstock-tritonserver \
    --env PATH=/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    --env LD_LIBRARY_PATH=/opt/tritonserver/lib
rm -rf "$STORE/rootfs"
