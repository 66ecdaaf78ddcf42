"""What `probjax bench --help` says of each suite, and where its configurations and its run are."""

from typing import NamedTuple


class SuiteHelp(NamedTuple):
    """One suite of the command line.

    Attributes:
      title: one line in the list of suites.
      text: what it measures.
      examples: command lines, without the program's name.
      configs: where the function is that makes configurations of what was given.
      run: where the function is that runs them.
    """

    title: str
    text: str
    examples: tuple[str, ...]
    configs: str
    run: str = "probjax.bench.network.run:run_network"


SUITES = {
    "attention": SuiteHelp(
        "attention against its peers",
        "Measure attention forward and backward against JAX's and PyTorch's, interleaved in one run: "
        "time, memory, and error against float64. Rows that cannot run here are listed with the reason. "
        "Ctrl-C keeps the cells finished so far.",
        (
            "attention --preset quick",
            "attention --seqs 512,2048 --variants causal --impls probjax_default,jax_xla",
            "attention --preset reference --torch-python ~/torch/bin/python --output full.json",
            "attention --seqs 512 --max-fit --memory-limit 2G --fit-seqs 4096,16384",
        ),
        "probjax.bench.attention.config:configs",
        "probjax.bench.attention.run:run_attention",
    ),
    "dispatch": SuiteHelp(
        "many short calls of attention, as small models make them",
        "Measure short attention calls from Python, inside a program and on the device, against JAX's own "
        "ways, tokamax and PyTorch. Meant for a GPU; it runs on a CPU too.",
        (
            "dispatch --workers 8",
            "dispatch --dtypes bfloat16 --seq-lens 64,512 --impls probjax_default,jax_cudnn --tag after",
            "dispatch --find-max --batch 1 --impls probjax_default,jax_xla --max-seq 65536",
        ),
        "probjax.bench.dispatch.config:configs",
        "probjax.bench.dispatch.run:run_dispatch",
    ),
    "recurrence": SuiteHelp(
        "the bare recurrences against their peers",
        "Measure linear_scan, selective_scan and ssd, forward and backward, against the usual forms in "
        "plain JAX, mamba_ssm's loop in PyTorch and jax-linear-attention: time, memory, and error against "
        "float64.",
        (
            "recurrence --preset quick",
            "recurrence --operations ssd --seqs 1024,4096 --impls probjax_default,xla_associative",
            "recurrence --preset gpu --output recurrence_gpu.json",
        ),
        "probjax.bench.recurrence.config:configs",
        "probjax.bench.recurrence.run:run_recurrence",
    ),
    "transformer": SuiteHelp(
        "a transformer: forward and train step",
        "Measure a transformer of 3.2 million parameters, forward and one train step, with our attention, "
        "with JAX's and without any, against the same model in plain Flax and in PyTorch.",
        (
            "transformer --preset quick",
            "transformer --tokens 512 --dtypes float32 --attention probjax_default,jax_xla,no_attention",
            "transformer --preset reference --torch-python ~/torch/bin/python --output transformer_cpu.json",
        ),
        "probjax.bench.transformer.config:transformer_configs",
    ),
    "diffusion": SuiteHelp(
        "a diffusion transformer: forward and train step",
        "Measure a diffusion transformer of 5.8 million parameters, forward and one train step, with our "
        "attention, with JAX's and without any.",
        (
            "diffusion --preset quick",
            "diffusion --preset reference --output diffusion_cpu.json",
        ),
        "probjax.bench.transformer.config:diffusion_configs",
    ),
    "ssm": SuiteHelp(
        "stacks of recurrent cells: forward and train step",
        "Measure stacks of Mamba, SSD and LRU cells, forward and one train step, against the same model "
        "with the associative scan over whole arrays of states.",
        (
            "ssm --preset quick",
            "ssm --cells mamba --tokens 1024 --variants none,remat",
            "ssm --preset reference --output ssm_cpu.json",
        ),
        "probjax.bench.ssm.config:configs",
        "probjax.bench.ssm.run:run_ssm",
    ),
    "unet": SuiteHelp(
        "UNets on images: forward and train step",
        "Measure the reference file's UNet, whose kernels are along the width only, and a two-dimensional "
        "one, forward and one train step.",
        (
            "unet --preset quick",
            "unet --models unet_2d --unet-res 32,64 --dtypes bfloat16",
        ),
        "probjax.bench.unet.config:configs",
    ),
    "moe": SuiteHelp(
        "a mixture of experts: forward and train step",
        "Measure a mixture of experts, forward and one train step, by how tokens are handed to their "
        "experts.",
        (
            "moe --preset quick",
            "moe --moe-tokens 1024,4096 --experts 16",
        ),
        "probjax.bench.moe.config:configs",
    ),
    "remat": SuiteHelp(
        "less memory for a train step: blocks computed again, donation",
        "Measure one train step of a transformer, a UNet and a recurrent model: plain, with every block "
        "computed again in backward, and with parameters donated.",
        (
            "remat --preset quick",
            "remat --models ssm --cells mamba,lru --variants plain,remat",
        ),
        "probjax.bench.remat.config:configs",
    ),
    "scan_remat": SuiteHelp(
        "deep transformers: layers unrolled or scanned, by what backward keeps",
        "Measure one train step of transformers of 12 and 24 layers, unrolled and scanned, by what the "
        "backward pass keeps of each layer.",
        (
            "scan_remat --preset quick",
            "scan_remat --layers 12 --remat none,save_attention --attention probjax_default,jax_xla",
        ),
        "probjax.bench.scan_remat.config:configs",
    ),
}
