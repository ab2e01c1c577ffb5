"""Tests meshes in the main job: flags, processes, microbatches and utilization."""

import jax
import numpy as np
import pytest
from helpers.main_job import tiny
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from coat_jax.models import llama
from experiments.common import meshes
from experiments.pretrain import program as pretrain
from experiments.training import processes, rows, speed
from experiments.training import trainer as training
from experiments.training.settings import model_config


def test_axes_are_read():
    assert meshes.parse("data=2, fsdp=4,tensor=2,context=8") == {
        "data": 2,
        "fsdp": 4,
        "tensor": 2,
        "context": 8,
    }
    assert meshes.parse("expert=2,fsdp=2") == {"expert": 2, "fsdp": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model=8", "the axes data, fsdp, expert, context and tensor, got 'model'"),
        ("sequence=2,fsdp=4", "the axis that splits sequences is context"),
        ("expert=2,context=2", "expert or context, not both"),
        ("pipeline=2", "pipelines of layers are not supported"),
        ("expert=2,tensor=2", "expert or tensor, not both"),
        ("fsdp=0", "N of 1 or more, got 'fsdp=0'"),
        ("fsdp", "N of 1 or more, got 'fsdp'"),
        ("fsdp=2,fsdp=2", "each axis once"),
        ("", "got ''"),
    ],
)
def test_wrong_axes_are_named(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--mesh", given])
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


def test_only_models_with_experts_split_them():
    mesh = AbstractMesh((1, 2, 2, 1, 1), meshes.AXES)
    assert meshes.batch_parts(mesh) == 4
    meshes.check_experts(llama.CONFIGS["moe-300m"], mesh)
    with pytest.raises(ValueError, match="fsdp=2,expert=2 splits experts, and the"):
        meshes.check_experts(llama.CONFIGS["124m"], mesh)
    shapes = {"gate_up": (2, 8, 2, 32, 64), "qkv": (2, 64, 64)}
    params = {name: jax.ShapeDtypeStruct(x, np.float32) for name, x in shapes.items()}
    specs = {k: v.spec for k, v in meshes.param_shardings(params, mesh).items()}
    assert specs["gate_up"] == P(None, ("expert", "fsdp", "context"), None, "tensor")
    assert specs["qkv"] == P(None, ("tensor", "fsdp", "expert", "context"))


def test_a_cpu_has_one_device_unless_a_mesh_is_named(capsys, tmp_path):
    assert meshes.make(None) is None
    devices = len(jax.devices())
    argv = ["--mesh", f"fsdp={devices + 1}", "--out", str(tmp_path / "run")]
    assert pretrain.main(argv) == 2
    output = capsys.readouterr().err
    assert f"--mesh fsdp={devices + 1} needs {devices + 1} devices, got" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("2", None, None), "--processes 2 needs --process-id and --coordinator"),
        (("2", 2, "host:1"), "below --processes 2, got 2"),
        (("2", 0, "host"), "must be HOST:PORT, got 'host'"),
        (("0", 0, "host:1"), "a number of 1 or more"),
        (("auto", 0, None), "auto alone"),
        ((None, 0, "host:1"), "got None"),
    ],
)
def test_wrong_processes_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        processes.Cluster.of(*given)


def test_processes_are_read():
    assert processes.Cluster.of(None, None, None) is None
    assert processes.Cluster.of("auto", None, None) == processes.Cluster()
    actual = processes.Cluster.of("2", 1, "host:80")
    assert actual == processes.Cluster(count=2, index=1, coordinator="host:80")


def test_a_process_alone_decides_by_itself():
    assert processes.is_main()
    assert processes.on_main(lambda: [1]) == [1]
    assert [processes.anywhere(flag) for flag in (False, True)] == [False, True]
    with pytest.raises(OSError, match="full"), processes.together():
        raise OSError("full")


def test_rows_of_another_process_are_not_written(tmp_path):
    with rows.NoRows(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1})
        log.drop_after(0)
        assert (log.name, log.sync()) == ("metrics.jsonl", 0)
    assert not list(tmp_path.iterdir())


def test_microbatches_are_scanned():
    """Tests of fine-tuning compare the summed gradients with the batch's."""
    settings = tiny(accumulate=4)
    trainer = training.Trainer(model_config(settings, "bf16", 257), settings, steps=10)
    batch = jax.ShapeDtypeStruct((4, settings.seq_len + 1), np.int32)
    state = trainer.abstract_state()
    arguments = state, batch, state.histories
    program = jax.make_jaxpr(lambda *args: trainer._gradients(*args)[1])(*arguments)
    scans = [e for e in program.eqns if e.primitive.name == "scan"]
    assert 4 in [scan.params["length"] for scan in scans]
    shapes = {v.aval.shape for scan in scans for v in scan.invars}
    assert (4, 1, settings.seq_len + 1) in shapes


def test_microbatches_divide_the_batch():
    with pytest.raises(ValueError, match="must divide batch_size, got 3 and 4"):
        tiny(accumulate=3)
    with pytest.raises(ValueError, match="accumulate must be positive, got 0"):
        tiny(accumulate=0)


def test_flops_of_llama_2_7b():
    """Matmuls use all 6,738,415,616 parameters except the embedding and the norms.

    The embedding has 131,072,000 parameters, and each of the 65 norms has 4,096.
    """
    matmuls = 6_738_415_616 - 131_072_000 - 65 * 4096
    # Scores and their use take 2 x 2 x 4096 for each of (2048 / 2) tokens and 32
    # layers, three times as much with backward.
    attention = 3 * 32 * (2048 // 2) * 2 * 2 * 4096
    config = llama.CONFIGS["llama2-7b"]
    assert speed.flops_per_token(config, 2048) == 6 * matmuls + attention


def test_utilization_needs_a_known_device(monkeypatch):
    assert speed.utilization(1e3, 10**9, 2) is None
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(speed.PEAKS, kind, 1e12)
    assert speed.utilization(1e3, 10**9, 2) == pytest.approx(0.5)
