"""Every field of a run with its default, unit and meaning. Data only.

ragen_jax/config/fields.py declares the accepted values and which runs read each field.

A config file copies these defaults and changes some; `--config.a.b=v` changes one field. The
defaults are the paper's (RAGEN-2, arXiv 2604.06268, section 4.1 and appendix B.2) where it gives
a value; the tiny preset of configs/sokoban.py documents where and why it differs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults."""
    return ConfigDict(
        dict(
            seed=0,  # random seed of the run; int >= 0
            steps=200,  # iterations, each one rollout and optimizer.minibatches updates
            model=dict(
                path="tiny",  # "tiny" (see warmstart), or a Hugging Face directory or hub id
                dtype="float32",  # dtype of activations and matrix products; parameters are float32
                attention="auto",  # attention kernel: auto | xla | cudnn (GPU) | splash (TPU)
                # Date in prompts, YYYY-MM-DD, if the chat template writes one (Llama 3.2). "auto":
                # the day the run starts; a resumed run keeps it.
                date="auto",
                remat=False,  # recompute each layer's activations in the backward pass
                lora=dict(  # train low-rank adapters instead of the model
                    rank=0,  # rank of the adapters; 0: train the model itself
                    alpha=32.0,  # adapters are scaled by alpha / rank
                    targets=("q", "k", "v", "o", "gate", "up", "down"),
                    tower=False,  # also adapt the vision tower of a vision-language model
                ),
            ),
            env=dict(
                name="sokoban",  # a key of envs.ENVS, or MODULE:CLASS for your own environment
                options=dict(),  # keyword arguments of the environment
                context="full",  # turns in a prompt: "full" (all) | "window" | "single_turn"
                window=3,  # turns that "window" shows, including the current turn
                max_context=0,  # most tokens of prompt and reply; drops old turns; 0: no limit
                pool=0,  # number of problems that training repeats; 0: new problems every step
                prompt="full",  # "full": rules, format, budgets; "terse": only the observation
                max_turns=5,  # most replies in an episode
                actions_per_turn=2,  # most actions executed per reply
                max_actions=10,  # most actions in an episode
                format_penalty=-0.1,  # reward of a malformed reply or an unknown action; <= 0
                time_limit=0.0,  # seconds per environment step; 0: no limit
                workers=16,  # environment steps run in parallel when time_limit is set
                # Largest fraction of a step's episodes that may fail (raise, hang or return invalid
                # values); they are excluded from training. Above it the run stops.
                max_error_share=0.1,
            ),
            # Further environments in the same run, as in configs/mixture.py:
            # name -> dict(groups=groups per step, env=a section like env).
            also=dict(),
            rollout=dict(
                groups=8,  # G: groups (prompts) per step of env
                group_size=16,  # K: episodes per group
                temperature=1.0,  # temperature of sampling and of the loss
                max_new_tokens=400,  # most tokens per reply
                compact=True,  # remove finished episodes from the decoding batch
                # Episodes decoded concurrently; a free slot takes the next episode. The KV cache
                # has this many rows. 0: all episodes of a step at once. Use it if reply lengths
                # vary widely or a step's cache does not fit; all programs are then compiled at
                # the start. For training and evaluation.
                slots=0,
                # Tokens decoded between checks for finished replies, whose episodes then continue
                # independently; at most max_new_tokens. 0: with slots, an eighth of max_new_tokens
                # (at least 24); without slots, all episodes wait for the turn's longest reply.
                chunk=0,
                # 1: play the next step's episodes during this step's updates, with the policy
                # before the updates. From the second step on, episodes are one step old;
                # algorithm.mismatch_cap corrects for it. Needs one device or
                # sampling_mesh.devices. 0: in turn.
                ahead=0,
                save_every=10,  # steps between files in rollouts/; 0: none
            ),
            collect=dict(  # selection of a step's groups before the filter
                max_rounds=1,  # most rollouts to find rollout.groups groups with variance (DAPO)
                # A problem of env.pool without variance in its last n visits is played with
                # probability max(explore ** n, explore_least). GRESO: 0.5; 1: always.
                explore=1.0,
                explore_least=0.01,
            ),
            filter=dict(
                strategy="top_p",  # top_p | top_k | top_k_abs | min_p | quarter | none
                value=0.9,  # parameter of the strategy; top_p: fraction of the variance mass kept
                metric="reward_variance",  # or reward_std, reward_sum, reward_mean, length
                mode="linear",  # top_p by "linear" mass (paper) or "softmax" (released scripts)
                keep="largest",  # or "smallest", for diagnosis
                include_zero=False,  # whether groups without variance can be kept
                eps=0.01,  # tolerance of the linear threshold
                # Multiply the loss by the fraction of groups kept ("linear") or its square root
                # ("sqrt"), or only the advantages by the fraction ("advantage", the released
                # code), or "none". A loss summed over rows (algorithm.aggregation
                # seq-mean-token-sum-norm) is already linear.
                loss_scale="linear",
                # Keep the same number of groups, drawn at random: the control experiment.
                at_random=False,
                # Episodes kept per kept group: the best top_members and the worst
                # bottom_members; 0 and 0: all.
                top_members=0,
                bottom_members=0,
            ),
            reward=dict(
                # Length of the range below max_new_tokens, in tokens, over which a penalty rises
                # from 0 to 1; 0: no penalty.
                overlong_buffer=0,
                # Normalisation of returns for the algorithm; filters and logs use the undiscounted
                # return. identity | mean | mean_std | asymmetric_clip
                normalize="identity",
                grouping="state",  # set to normalise over: state (the group) | environment | batch
                level="turn",  # placement of unnormalised rewards: token | turn | episode
            ),
            algorithm=dict(
                # ppo (with critic) | grpo | dr_grpo | rloo | reinforce_plus_plus |
                # reinforce_plus_plus_baseline
                name="grpo",
                gamma=1.0,  # ppo, reinforce_plus_plus: discount per sampled token
                lam=1.0,  # ppo: lambda of GAE
                bi_level=False,  # ppo: GAE over turns, then over tokens within each turn
                turn_gamma=1.0,  # discount per turn of bi_level
                soft_weights=False,  # scale advantages by the group's std / largest std of the step
                objective="ppo",  # ppo (dual clip) | gspo (sequence ratios) | cispo
                clip_low=0.2,  # lower bound of the ratio: 1 - clip_low
                clip_high=0.28,  # upper bound of the ratio: 1 + clip_high
                clip_c=3.0,  # dual clip for negative advantages, above 1; 0: none
                aggregation="token-mean",  # a key of losses.AGGREGATIONS
                # Estimator: k1 | abs | k2 | k3; with the gradient of k2: k1+ | abs+ | k3+; "exact"
                # sums over the vocabulary.
                kl_kind="k3",
                kl_coef=0.001,  # coefficient of KL(policy || initial policy); 0: no KL
                kl_in="loss",  # or "reward": subtracted from each token's reward
                # Where to keep the reference policy between uses: "device", or "host": pinned host
                # memory, copied to the devices for every update.
                kl_memory="device",
                kl_target=0.0,  # KL in nats per token to which kl_coef adapts; 0: fixed
                kl_gain=0.1,  # adaptation rate of kl_coef
                entropy_coef=0.001,  # coefficient of the exact entropy bonus
                # Tokens with the bonus: all | actions (inside <answer>) | upper_groups |
                # lower_groups (the half of the groups with the larger or smaller filter score)
                entropy_on="all",
                # Fraction of the run's level of MI (see regimes) at which the bonus is 0; it rises
                # linearly to its full value at the level. 0: constant bonus.
                entropy_gate=0.0,
                # Coefficient of an advantage for reasoning that identifies its prompt among those
                # of the step (algorithm/bonus.py), in nats minus the mean; 0: none.
                mi_coef=0.0,
                zvp_coef=0.0,  # coefficient of RL-ZVP advantages of no-variance groups; 0: none
                # Upper bound of the importance weights that correct differences between sampler
                # and trainer, >= 1; 0: no weights, or 2 with rollout.ahead.
                mismatch_cap=0.0,
                mismatch_level="token",  # level of these weights: "token" or "sequence"
            ),
            critic=dict(  # for ppo; other settings as in optimizer
                learning_rate=1e-5,
                clip=0.5,  # largest change of a value per update, in units of reward
                warmup_steps=0,  # iterations that train only the critic
            ),
            optimizer=dict(
                learning_rate=1e-6,
                schedule="constant",  # or "linear", "cosine": decay to 0 over the run
                warmup_updates=0,  # updates of linear warm-up from 0
                b1=0.9,
                b2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                max_grad_norm=1.0,  # bound of the gradient's global norm
                minibatches=4,  # updates per iteration, which share the kept rows evenly
                micro_batch=4,  # rows per forward and backward pass
            ),
            diagnose=dict(
                every=1,  # steps between collapse diagnostics; 0: never
                # Steps between flow/ metrics, on steps that `every` selects; 0: never. If prompts
                # show earlier replies, these steps also compute collapse/trajectory_stripped,
                # which doubles the cost of the trajectory scope.
                flow_every=5,
                # Steps between diagnostics/*.npz, on steps that `every` selects: the first-turn
                # scores behind MI, at most 64 x 64 (reasoning x prompts); 0: none.
                scores_every=10,
                first_turn_samples=64,  # first turns scored under all first prompts
                trajectory_samples=64,  # turns sampled from whole trajectories
                micro_batch=64,  # (prompt, reasoning) pairs per device call
                # Steps between probe/ metrics, from first turns on a fixed set of held-out
                # problems with fixed noise; the first probe is before any update. 0: never.
                probe_every=0,
                probe_problems=32,  # at most eval.episodes
                probe_samples=4,  # replies per problem
                # Compute probe/mediation/ (diagnostics/mediation.py): whether actions depend on
                # the reasoning, by blocked attention, gradients and exchanged reasoning.
                probe_mediation=False,
                gradients_every=0,  # steps between gradients by reward variance; 0: never
                gradients_groups=96,  # held-out groups to use; 0: the step's groups
                gradients_buckets=6,  # buckets of equal size; groups without variance are separate
                gradients_edges=(),  # or increasing reward variances between buckets
            ),
            eval=dict(
                every=20,  # steps between evaluations, the first before any update; 0: none
                episodes=512,  # number of held-out problems, the same every time
                temperature=0.5,
                top_k=0,  # 0: all
                top_p=1.0,  # 1: all
                min_p=0.0,  # 0: all
                seed=0,  # seed of the held-out set and of its sampling noise
            ),
            stopping=dict(  # action: "stop" (exit code 3) | "warn" (once per streak) | "off"
                variance=dict(  # the groups' mean reward variance has collapsed
                    action="stop",
                    patience=5,  # iterations in a row
                    ratio=0.1,  # threshold, as a fraction of the mean over the first iterations
                    baseline=10,  # number of first iterations
                ),
                success=dict(  # held-out success stays low
                    action="stop",
                    patience=5,  # evaluations in a row, without the first (before any update)
                    least=0.01,  # threshold of success
                ),
                empty=dict(  # the filter keeps nothing
                    action="stop",
                    patience=5,  # iterations in a row
                ),
                nonfinite=dict(  # an update was skipped: its loss or gradient was not finite
                    action="stop",
                    patience=3,  # iterations in a row
                ),
            ),
            # The collapse alarm; diagnostics/regimes.py explains the fields. Thresholds are
            # fractions of the metric's level, its mean over an early part of the run.
            regimes=dict(
                # warn | stop (exit code 3) | checkpoint | tighten (the filter) | off
                action="warn",
                baseline=5,  # fewest values in a level
                recent=15,  # steps in the recent mean, at least the last 4 to 6 values
                long=100,  # most values in a level
                clear_patience=5,  # steps near the level that end a sign
                recover=0.5,  # "near": this fraction of the logarithmic distance back to the level
                low=0.5,  # threshold of low H(Z|X) and low information for regime/index
                mi=0.63,  # below: an alarm
                mi_sign=0.8,  # below: a sign; two signs are an alarm
                valid_think=0.9,  # below: a sign
                valid_action=0.92,  # below: a sign
                grounded=0.85,  # fraction of stated facts that are true; below: a sign
                length=dict(fall=0.5, rise=1.5),  # below or above: a sign, but no alarm alone
                entropy=dict(fall=0.25, rise=2.0),  # below or above: a sign, but no alarm alone
                tighten=dict(
                    every=3,  # steps of an alarm between two changes
                    factor=0.95,  # factor applied to filter.value at each change
                    least=0.8,  # smallest fraction of filter.value
                ),
            ),
            report=dict(
                # Steps between updates of report.html, written by a separate process; 0: only at
                # the end of the run.
                every=50,
            ),
            checkpoint=dict(
                every=20,  # steps between checkpoints; 0: only the last step, always saved
                keep=2,  # newest checkpoints kept
                disk_retry_seconds=600.0,  # longest wait for a failing disk; 0: none
                export=True,  # write the trained model in Hugging Face format at the end
            ),
            log=dict(
                # Trackers that receive the metrics: any of tensorboard, wandb, mlflow, trackio
                # (ragen_jax/run/trackers.py).
                trackers=("tensorboard",),
            ),
            mesh=dict(  # devices along each axis; one may be -1: the remaining devices
                data=-1,  # splits rows
                fsdp=1,  # splits rows and parameters
                tensor=1,  # splits heads, MLP and vocabulary
            ),
            # The same for sampling and scoring: fsdp=1 gathers weights, tensor>1 splits them by
            # heads. All three 0: as mesh.
            sampling_mesh=dict(
                data=0,
                fsdp=0,
                tensor=0,
                devices=0,  # number of devices for sampling only; 0: all devices sample and train
            ),
            warmstart=dict(  # the tiny agent, used when model.path is "tiny"
                seed=0,  # seed of its parameters and data order
                width=96,
                layers=2,
                heads=4,
                kv_heads=1,
                mlp_width=256,
                tower_layers=0,  # layers of its vision tower; 0: no vision
                tower_width=64,
                rooms=8192,  # solved problems to imitate
                plan_moves=4,  # moves of the solver's plan in the reasoning
                # Reasoning style (envs/styles.py) -> its fraction of the demonstrations; empty:
                # the environment's `explain`
                styles=dict(),
                # env.options that differ in the demonstrations, for example an easier world
                options=dict(),
                batch=64,  # replies per update
                learning_rate=3e-3,
                check_every=50,  # updates between checks of success
                check_episodes=256,  # problems per check, at temperature 1
                success=0.35,  # success rate at which imitation stops; 0 to 1
                max_updates=6000,  # most updates; an error if success is not reached by then
            ),
        )
    )
