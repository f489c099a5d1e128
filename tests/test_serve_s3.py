"""Sessions and videos kept in an object store: S3 as moto has it, by fsspec."""

import pytest
import torch
from serving import make_engine, playing, serving, tiny

from tachyscope.core.errors import TachyscopeError
from tachyscope.serve.snapshots import KEPT, Saved, Snapshots, hash_secret

pytest.importorskip("s3fs", reason="s3fs is not installed")
moto = pytest.importorskip("moto.server", reason="moto is not installed")
# of libraries that are not ours
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAME, SECRET = "0" * 16, "1" * 32


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A bucket, as an address for `--state`."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().makedirs("state", exist_ok=True)
    try:
        yield f"s3://state/{tmp_path.name}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def test_snapshots_lie_in_a_bucket_as_in_a_folder(place):
    snapshots, other, files = Snapshots(place), Snapshots(place), ()
    other.sweep(3600, 10)  # of nothing
    assert not other.has(NAME)
    for chunk in range(4, 28, 4):
        saved = Saved(hash_secret(SECRET), {"chunk": chunk}, 0, files)
        files, _ = snapshots.save(NAME, saved, chunk, {"x": torch.full((8,), chunk)})
    found = other.find(NAME, SECRET)
    assert other.has(NAME) and len(found.files) == KEPT and found.log == {"chunk": 24}
    for chunk, file in found.files:
        assert other.load(NAME, file)["x"].unique().item() == chunk
    assert len(other.fs.ls(f"{other.root}/{NAME}")) == KEPT + 1  # older ones are gone
    other.fs.pipe_file(f"{other.root}/{NAME}/{found.files[-1][1]}", b"changed")
    with pytest.raises(TachyscopeError, match="is missing or damaged"):
        other.load(NAME, found.files[-1][1])
    other.sweep(3600, 10)
    assert other.has(NAME)
    snapshots.sweep(0, 10)
    assert not other.has(NAME)
    with pytest.raises(TachyscopeError, match="no session of this name"):
        other.find(NAME, SECRET)


def test_a_session_goes_on_on_another_machine_from_a_bucket(place):
    model = tiny()
    with serving(make_engine(model, place)) as client, playing(client, seed=3) as player:
        player.send("keys", id=1, actions="w")
        player.until("snapshot")
    known = {name: player.opened[name] for name in ("session", "secret")}
    with (
        serving(make_engine(model, place)) as client,
        playing(client, "resume", format="png", **known) as again,
    ):
        assert again.opened["chunk"] > max(chunk for _, chunk in player.chunks) - 1
        again.until_frame(3 * again.opened["chunk"] + 5)
        again.send("close")
        again.until("closed")
    assert not Snapshots(place).has(known["session"])


def test_a_cluster_s_videos_lie_in_a_bucket(place):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from tachyscope.serve.ray.videos import VideoFiles

    files, name = VideoFiles(place), f"video_{'0' * 24}"
    assert files.names() == []
    files.write({"id": name, "status": "completed", "touched": 0.0})
    files.write_video(name, b"mp4")
    other = VideoFiles(place)
    assert other.names() == [name] and other.read(name)["status"] == "completed"
    assert other.read_video(name) == b"mp4"
    other.remove(name)
    assert files.names() == []
