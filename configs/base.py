"""Every field of a run, once, with its unit and meaning. Data only.

What each may hold, and which runs read it, is in ragen_jax/config/fields.py.

A config file copies this and changes what it needs; `--config.a.b=v` changes one field. The
values here are the paper's (RAGEN-2, arXiv 2604.06268, section 4.1 and appendix B.2) where it
gives one; the tiny preset of configs/sokoban.py says where and why it departs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults."""
    return ConfigDict(
        dict(
            seed=0,  # of everything random in the run
            steps=200,  # iterations: one rollout and optimizer.minibatches updates each
            model=dict(
                path="tiny",  # "tiny" (see warmstart), or a Hugging Face directory or hub id
                dtype="float32",  # of activations and products; parameters are float32
                attention="auto",  # kernel of whole rows: auto | xla | cudnn (GPU) | splash (TPU)
                # The day that the chat template writes into prompts if it writes one (Llama 3.2's),
                # YYYY-MM-DD. "auto": the day on which the run starts, which it keeps when resumed.
                date="auto",
                remat=False,  # recompute each layer's activations in the backward pass
                lora=dict(  # train low-rank adapters instead of the model
                    rank=0,  # 0: train the model itself
                    alpha=32.0,  # the adapters are scaled by alpha / rank
                    targets=("q", "k", "v", "o", "gate", "up", "down"),
                    tower=False,  # those of the vision tower, too, where the model sees
                ),
            ),
            env=dict(
                name="sokoban",  # a key of envs.ENVS, or MODULE:CLASS of your own
                options=dict(),  # keyword arguments of the environment
                context="full",  # turns a prompt shows: "full" all | "window" | "single_turn" one
                window=3,  # turns that "window" shows, the current one included
                max_context=0,  # tokens of prompt and reply: older turns make room; 0: no limit
                pool=0,  # problems that training plays again and again; 0: always fresh ones
                prompt="full",  # "full": rules, format, budgets; "terse": the observation alone
                max_turns=5,  # replies an episode may hold
                actions_per_turn=2,  # actions of a reply that are run
                max_actions=10,  # actions of an episode
                format_penalty=-0.1,  # of a malformed reply or an unknown action, <= 0
                time_limit=0.0,  # seconds of a step, for environments that wait; 0: none
                workers=16,  # episodes whose steps run at the same time, where there is a limit
                # Share of a step's episodes that may break (raise, hang, return nonsense), which
                # are not learnt from; beyond it the run stops.
                max_error_share=0.1,
            ),
            # Environments that train together with env, as in configs/mixture.py:
            # name -> dict(groups of a step, env: a section like env).
            also=dict(),
            rollout=dict(
                groups=8,  # G: environment seeds (prompts) a step, of env alone
                group_size=16,  # K: episodes of each
                temperature=1.0,  # of sampling and of the loss
                max_new_tokens=400,  # of one reply
                compact=True,  # drop finished episodes from the batch
                # Episodes played at a time, a free slot taking the next one, in training and
                # evaluation; 0: all of a step. The cache has room for so many. What to use where
                # replies are long and of many lengths, or where a step's cache does not fit. All
                # programs of a run are then compiled at its start.
                slots=0,
                # Tokens between two looks at which replies have ended, whose episodes then go on
                # without the others; at most max_new_tokens. 0: with slots an eighth of it (24 at
                # least); without, a turn ends for all when its longest reply does.
                chunk=0,
                # 1: the next step's episodes are played while this one's updates run, by the policy
                # before them: from the second step on they are one step old when they are learnt
                # from, which algorithm.mismatch_cap weighs. One device, or sampling_mesh.devices.
                ahead=0,
                save_every=10,  # steps between rollouts/*.jsonl files; 0: none
            ),
            collect=dict(  # which groups a step has, before the filter
                max_rounds=1,  # rollouts to find rollout.groups groups with variance in (DAPO)
                # A problem of env.pool whose last n visits had no variance is played with chance
                explore=1.0,  # explore ** n (GRESO: 0.5); 1: always
                explore_least=0.01,  # but no less
            ),
            filter=dict(
                strategy="top_p",  # top_p | top_k | top_k_abs | min_p | quarter | none
                value=0.9,  # top_p: share of the variance mass kept
                metric="reward_variance",  # or reward_std, reward_sum, reward_mean, length
                mode="linear",  # top_p by "linear" mass (paper) or "softmax" (released scripts)
                keep="largest",  # or "smallest", for diagnosis
                include_zero=False,  # whether groups without variance are candidates
                eps=0.01,  # slack of the linear threshold
                # The loss times the keep rate ("linear") or its root ("sqrt"), or the advantages
                # alone times it ("advantage", the released code), or "none". A loss that is a sum
                # over rows (algorithm.aggregation seq-mean-token-sum-norm) is linear as it is.
                loss_scale="linear",
                # Keep as many groups, but drawn at random whatever they scored: the control.
                at_random=False,
                # Of each group kept, only so many episodes, the best ones; 0 and 0: all.
                top_members=0,
                bottom_members=0,  # the worst ones
            ),
            reward=dict(
                # A reply's last so many tokens before max_new_tokens cost it up to 1; 0: nothing.
                overlong_buffer=0,
                # What the algorithm is given; filters and logs see the undiscounted return.
                normalize="identity",  # identity | mean | mean_std | asymmetric_clip: of returns
                grouping="state",  # over what: state (the group) | environment | batch
                level="turn",  # where unnormalised rewards lie: token | turn | episode
            ),
            algorithm=dict(
                # ppo (with critic) | grpo | dr_grpo | rloo | reinforce_plus_plus |
                # reinforce_plus_plus_baseline
                name="grpo",
                gamma=1.0,  # ppo, reinforce_plus_plus: discount a sampled token of an episode
                lam=1.0,  # ppo: lambda of GAE
                bi_level=False,  # ppo: GAE over turns, then over the tokens of each
                turn_gamma=1.0,  # its discount a turn
                soft_weights=False,  # advantages times the group's std over the largest of the step
                objective="ppo",  # ppo (dual clip) | gspo (sequence ratios) | cispo
                clip_low=0.2,  # ratio may fall to 1 - clip_low
                clip_high=0.28,  # and rise to 1 + clip_high
                clip_c=3.0,  # dual clip for negative advantages; 0: none
                aggregation="token-mean",  # a key of losses.AGGREGATIONS
                # k1 | abs | k2 | k3; with the gradient of k2: k1+ | abs+ | k3+; over the whole
                # vocabulary: exact
                kl_kind="k3",
                kl_coef=0.001,  # of KL(policy || initial policy); 0 skips its forward pass
                kl_in="loss",  # or "reward": taken off each token's reward
                # Where the reference rests while it is not read: "device", or "host", pinned memory
                # from which it is copied to the devices for every update.
                kl_memory="device",
                kl_target=0.0,  # nats a token that kl_coef is steered to; 0: kl_coef stays
                kl_gain=0.1,  # how fast
                entropy_coef=0.001,  # of the exact entropy bonus
                # all | actions (the tokens inside <answer>) | upper_groups, lower_groups (the half
                # of the groups with the larger, the smaller filter score)
                entropy_on="all",
                # Share of the run's level of MI (regimes) at which the bonus has faded to nothing,
                # from all of it at the level; 0: it does not fade.
                entropy_gate=0.0,
                # Of an advantage that a reasoning gets for what it tells of its prompt among those
                # of the step (bonus.py), in nats, less the mean; 0: none.
                mi_coef=0.0,
                zvp_coef=0.0,  # of RL-ZVP's advantages of groups without variance; 0: none
                # Of the weights for a sampler unlike the trainer; 0: no weights, but 2 with
                # rollout.ahead.
                mismatch_cap=0.0,
                mismatch_level="token",  # or "sequence"
            ),
            critic=dict(  # of ppo; all else as the policy's optimizer
                learning_rate=1e-5,
                clip=0.5,  # how far a value may move in an update, in units of reward
                warmup_steps=0,  # iterations in which the critic alone learns
            ),
            optimizer=dict(
                learning_rate=1e-6,
                schedule="constant",  # or "linear", "cosine": to 0 over the run's updates
                warmup_updates=0,  # linear from 0
                b1=0.9,
                b2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                max_grad_norm=1.0,  # clip by global norm
                minibatches=4,  # updates an iteration; the kept rows are split evenly over them
                micro_batch=4,  # rows of one forward and backward pass
            ),
            diagnose=dict(
                every=1,  # steps between collapse diagnostics; 0: never
                # Steps between flow figures, where `every` falls, too; 0: never. Where prompts show
                # earlier replies these steps also score collapse/trajectory_stripped, in a pass of
                # its own that doubles what the trajectory scope costs.
                flow_every=5,
                # Steps between diagnostics/*.npz, where `every` falls, too: the first-turn scores
                # that MI is computed from, of at most 64 reasonings under 64 prompts; 0: none.
                scores_every=10,
                first_turn_samples=64,  # reasonings scored under all first prompts
                trajectory_samples=64,  # turns drawn over whole trajectories
                micro_batch=64,  # (prompt, reasoning) rows of a device call
                # Steps between probe/ figures: first turns of held-out problems, the same with the
                # same noise every time, more of them than a step has; the first before any update.
                # 0: never.
                probe_every=0,
                probe_problems=32,
                probe_samples=4,  # replies to each
                # Also probe/mediation/ (diagnostics/mediation.py): whether their actions hang on
                # the reasoning, by attention that is blocked, gradients and reasoning exchanged.
                probe_mediation=False,
                gradients_every=0,  # steps between gradients by reward variance; 0: never
                gradients_groups=96,  # of so many held-out problems; 0: of the step's own groups
                gradients_buckets=6,  # of equally many groups, those without variance apart
                gradients_edges=(),  # instead: reward variances that part the buckets, rising
            ),
            eval=dict(
                every=20,  # steps between evaluations; the first is before any update; 0: none
                episodes=512,  # problems of the held-out set, the same every time
                temperature=0.5,
                top_k=0,  # 0: all
                top_p=1.0,  # 1: all
                min_p=0.0,  # 0: all
                seed=0,  # of the set and of the noise of each problem
            ),
            stopping=dict(  # action of a rule: "stop" (exit code 3) | "warn" once a streak | "off"
                variance=dict(  # the groups' mean reward variance has collapsed
                    action="stop",
                    patience=5,  # iterations in a row
                    ratio=0.1,  # of the mean over the first iterations, below which one counts
                    baseline=10,  # those first iterations
                ),
                success=dict(  # held-out success stays low
                    action="stop",
                    patience=5,  # evaluations in a row, the first (before any update) apart
                    least=0.01,  # success below which one counts
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
            # The alarm of diagnostics/regimes.py, which says what these mean. Numbers of kinds are
            # shares of the figure's own level.
            regimes=dict(
                # warn | stop (exit code 3) | checkpoint | tighten (the filter) | off
                action="warn",
                baseline=5,  # values, the fewest that a level is a mean of
                recent=15,  # steps of the mean that is judged, at least its last 4 to 6 values
                long=100,  # values, the most that a level is a mean of
                clear_patience=5,  # steps nearer to the level that end a sign
                recover=0.5,  # the way back: this share of it, in logarithms, towards the level
                low=0.5,  # below which H(Z|X) or information counts as low for regime/index
                mi=0.63,  # below: an alarm on its own
                mi_sign=0.8,  # below: a sign, an alarm with another one
                valid_think=0.9,  # below: a sign
                valid_action=0.92,
                grounded=0.85,  # share of the facts stated that are so
                length=dict(fall=0.5, rise=1.5),  # below, above: a sign, but no alarm alone
                entropy=dict(fall=0.25, rise=2.0),  # the same
                tighten=dict(
                    every=3,  # steps of an alarm
                    factor=0.95,  # filter.value is multiplied by it, again and again
                    least=0.8,  # until that is left of it
                ),
            ),
            report=dict(
                # Steps between two pages report.html of a run that goes on, written by a process
                # beside it; 0: none but the one at the end.
                every=50,
            ),
            checkpoint=dict(
                every=20,  # steps; the last step is always saved; 0: only the last
                keep=2,  # newest checkpoints kept
                disk_retry_seconds=600.0,  # how long to wait for a full or failing disk; 0: not
                export=True,  # write the trained model in Hugging Face format at the end
            ),
            log=dict(
                # What shows metrics.jsonl elsewhere: any of tensorboard, wandb, mlflow, trackio
                # (ragen_jax/run/trackers.py).
                trackers=("tensorboard",),
            ),
            mesh=dict(  # devices along each axis; one may be -1: all the rest
                data=-1,  # splits rows
                fsdp=1,  # splits rows and parameters
                tensor=1,  # splits heads, MLP and vocabulary
            ),
            # The same for sampling and scoring: weights gathered where fsdp is 1, split by heads
            # where tensor is more. All three 0: as mesh.
            sampling_mesh=dict(
                data=0,
                fsdp=0,
                tensor=0,
                devices=0,  # the last so many devices, which then do not train; 0: all do both
            ),
            warmstart=dict(  # the tiny agent, used when model.path is "tiny"
                seed=0,  # of its parameters and data order
                width=96,
                layers=2,
                heads=4,
                kv_heads=1,
                mlp_width=256,
                tower_layers=0,  # of a vision tower, with which it sees images; 0: it does not see
                tower_width=64,
                rooms=8192,  # solved for imitation
                plan_moves=4,  # moves of the solver's plan that the reasoning spells out
                # style of envs/styles.py -> its share of the demonstrations; nothing given: what
                # the environment's `explain` writes
                styles=dict(),
                # env.options that are other ones while it is taught: an easier world than the one
                # that it is trained in, say
                options=dict(),
                batch=64,  # replies an update
                learning_rate=3e-3,
                check_every=50,  # updates between checks of success
                check_episodes=256,  # rooms of a check, at temperature 1
                success=0.35,  # stop at the first check that reaches it
                max_updates=6000,  # give up after as many
            ),
        )
    )
