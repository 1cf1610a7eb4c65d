"""Downloads files of a model with the official client, so that the tests' hub is held to it. Prints the commit."""

import os
import sys

os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from huggingface_hub import HfApi, snapshot_download

endpoint, model, revision, directory, *names = sys.argv[1:]
token = os.environ.get("TOKEN") or False
listed = {file.path: file for file in HfApi(endpoint=endpoint, token=token).list_repo_tree(model, revision=revision, recursive=True)}
assert set(names) <= set(listed), (names, listed)
snapshot_download(
    model, revision=revision, local_dir=directory, allow_patterns=names, endpoint=endpoint, token=token,
    cache_dir=os.path.join(directory, "..", "official-cache"),
)
print(HfApi(endpoint=endpoint, token=token).model_info(model, revision=revision).sha)
