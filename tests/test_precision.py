import pytest

from workflow_scripts.lib import precision


@pytest.mark.parametrize(
    ("device", "here", "bfloat16", "expected"),
    [
        ("auto", (False, False), True, ("cpu", "float32")),
        ("auto", (True, False), True, ("mps", "bfloat16")),
        ("auto", (True, False), False, ("mps", "float16")),
        ("auto", (False, True), True, ("cuda", "bfloat16")),
        ("auto", (False, True), False, ("cuda", "float16")),
        ("cpu", (True, False), True, ("cpu", "float32")),
    ],
)
def test_torch_auto(device, here, bfloat16, expected):
    mps, cuda = here
    found = precision.resolve_torch(device, "auto", mps=mps, cuda=cuda, bfloat16=bfloat16)
    assert found == expected


@pytest.mark.parametrize(
    ("metal", "cuda", "expected"),
    [
        (False, False, ("cpu", "float32")),
        (True, False, ("metal", "bfloat16")),
        (False, True, ("cuda", "bfloat16")),
    ],
)
def test_mlx_auto(metal, cuda, expected):
    assert precision.resolve_mlx("auto", "auto", metal=metal, cuda=cuda, bits=4) == expected


def test_refused_precisions():
    with pytest.raises(ValueError, match="'float16' is not allowed for torch on cpu"):
        precision.resolve_torch("cpu", "float16", mps=False, cuda=False)
    with pytest.raises(ValueError, match="'bfloat16' is not allowed for torch on mps"):
        precision.resolve_torch("mps", "bfloat16", mps=True, cuda=False, bfloat16=False)
    with pytest.raises(precision.UnavailableError, match="finds no metal here, only cpu"):
        precision.resolve_mlx("metal", "auto", metal=False, cuda=False)
    with pytest.raises(ValueError, match="bits: 3"):
        precision.resolve_mlx("cpu", "auto", metal=False, cuda=False, bits=3)


def test_loss_scale_halves_skips_and_grows_back():
    scale = precision.LossScale.for_dtype("float16")
    assert scale.skips(finite=False)
    assert scale.value == 512.0
    assert not any(scale.skips(finite=True) for _ in range(scale.patience))
    assert scale.value == 1024.0
    assert not precision.LossScale.for_dtype("bfloat16").skips(finite=False)
