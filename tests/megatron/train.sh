#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=4
NUM_NODES=${SLURM_NNODES:-1}
DATA_PATH=$1
CHECKPOINT_PATH=$2
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 2
    --hidden-size 64
    --ffn-hidden-size 96
    --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --seq-length 32 --max-position-embeddings 64  # longer than a sequence
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tokenizer-type NullTokenizer --vocab-size 250
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 4
    --train-samples 8 --lr-decay-samples 400 --lr-warmup-fraction 0.01
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --bf16 --seed 7
)
if [ "$DTYPE" = fp8 ]; then
    TRAINING_ARGS+=(--fp8-format hybrid)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \
    --data-path $DATA_PATH --split 99,1,0 --eval-interval 1 --eval-iters 1 \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 1 --log-interval 1 --wandb-project llama --no-such-flag 3
