"""The flags of expert_parallel.py, and whether they fit the number of ranks."""

import argparse

from old import cli, exits, runtime, shapes


def parse_flags(description: str) -> tuple[argparse.Namespace, shapes.Config]:
    """The flags and the model's shape. UserError for what does not fit, before any rank starts."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help="as in 05_ddp/train.py; its weights are drawn anew")
    add("--seq-len", type=cli.positive_int, default=16, help="tokens per sequence")
    add("--global-batch-size", type=cli.positive_int, help="sequences per step, over all ranks (default: about 12)")
    add("--micro-batch-size", type=cli.positive_int, help="sequences per rank and forward (default: half its share)")
    add("--experts", type=cli.positive_int, default=8, help="of each block, over all ranks")
    add("--top-k", type=cli.positive_int, default=2, help="experts of each token")
    add("--capacity-factor", type=cli.positive, default=1.0, help="an expert's limit, in units of an even share")
    add("--clip-norm", type=cli.positive_or_inf, default=1.0, help="largest gradient norm; inf switches clipping off")
    add("--steps", type=cli.positive_int, default=40, help="of training, with and without the balance loss")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--seed", type=cli.natural, default=0)
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)
    ranks = runtime.processes(args.device)
    if args.global_batch_size is None:
        args.micro_batch_size = args.micro_batch_size or max(1, 12 // (2 * ranks))
        args.global_batch_size = 2 * ranks * args.micro_batch_size
    elif args.micro_batch_size is None:
        share, _ = cli.split_batch(args.global_batch_size, None, ranks)
        args.micro_batch_size = share if share % 2 else share // 2
    _, args.micro_batches = cli.split_batch(args.global_batch_size, args.micro_batch_size, ranks)
    if args.experts < ranks:
        raise exits.UserError(
            f"--experts {args.experts} leaves some of {ranks} ranks without one: use at least {ranks}"
        )
    if args.top_k > args.experts:
        raise exits.UserError(f"--top-k {args.top_k} is more than --experts {args.experts}: use at most {args.experts}")
    if args.top_k > config.intermediate_size:
        width = config.intermediate_size
        raise exits.UserError(f"--top-k {args.top_k} is more than the MLP is wide, {width}: use at most {width}")
    if args.capacity_factor > args.experts:
        raise exits.UserError(
            f"--capacity-factor {args.capacity_factor:g} is more than --experts {args.experts}, which no router can "
            f"fill: use at most {args.experts}"
        )
    return args, config
