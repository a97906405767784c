"""OCI images of one layer, made from a directory or from the outline of the machine's own root."""

import hashlib
import io
import json
import os
import tarfile


def of_directory(source, name, archive, command=()):
    """Write an image of everything below `source`, with the command that its containers run by default."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(source, arcname=".", filter=_root_owned)
    _write(layer.getvalue(), name, archive, command)


def of_outline(name, archive, root="/"):
    """Write an image with the directories and links at the top of `root`, but nothing in them.

    It is filled by bind mounts. The links must be the machine's own: mounting over a directory where the machine has a
    link to another one would show the same directory twice, which CRIU cannot restore.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            info = tarfile.TarInfo(entry.name)
            if entry.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
            elif entry.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if entry.name == "tmp" else 0o755
            else:
                continue
            tar.addfile(info)
    _write(layer.getvalue(), name, archive)


def _root_owned(info):
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _write(layer, name, archive, command=()):
    blobs = {}

    def blob(data, media_type):
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    layer_descriptor = blob(layer, "application/vnd.oci.image.layer.v1.tar")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], **({"Cmd": list(command)} if command else {})},
        "rootfs": {"type": "layers", "diff_ids": [layer_descriptor["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [layer_descriptor],
    }
    entry = blob(json.dumps(manifest).encode(), manifest["mediaType"])
    entry["annotations"] = {"io.containerd.image.name": name}
    files = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        **blobs,
    }
    with tarfile.open(archive, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
