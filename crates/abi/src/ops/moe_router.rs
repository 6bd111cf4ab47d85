//! Router of a mixture of experts: parameters, entry points, and the arithmetic that host and device share.
//!
//! Scores are computed from exactly rounded operations alone, in a fixed order ([`crate::exact`]), so that every
//! backend sends a token to the same experts.

use crate::DType;
use crate::exact::{exp_neg, sigmoid};

/// Sizes, strides and options of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeRouterDims {
    /// Rows of the logits.
    pub tokens: u32,
    /// Logits of a row, at most [`MAX_EXPERTS`].
    pub experts: u32,
    /// Experts of a token, at most [`MAX_TOP_K`].
    pub top_k: u32,
    /// From one row of the logits to the next.
    pub logits_stride: u32,
    /// Groups of neighbouring experts, at most [`MAX_GROUPS`]; 1: no groups.
    pub num_groups: u32,
    /// Experts of a group.
    pub group_size: u32,
    /// Groups that a token may choose from.
    pub top_groups: u32,
    /// [`SIGMOID`], [`NORMALISED`], [`ROUND_F16`], [`ROUND_BF16`].
    pub options: u32,
    /// What weights are multiplied by.
    pub scale: f32,
    /// Of the experts by which pairs are sorted, the first.
    pub first_expert: u32,
    /// And how many there are.
    pub own_experts: u32,
}

const _: () = assert!(size_of::<MoeRouterDims>() == 44);
impl crate::Params for MoeRouterDims {}

/// In [`MoeRouterDims::options`]: a score is the sigmoid of its logit; else the softmax over all experts.
pub const SIGMOID: u32 = 1;
/// In [`MoeRouterDims::options`]: weights are divided by their sum.
pub const NORMALISED: u32 = 2;
/// In [`MoeRouterDims::options`]: weights are rounded to f16.
pub const ROUND_F16: u32 = 4;
/// In [`MoeRouterDims::options`]: weights are rounded to bf16.
pub const ROUND_BF16: u32 = 8;

/// Most experts: the keys of a block's tokens are in shared memory.
pub const MAX_EXPERTS: u32 = 2048;
/// Most experts of a token: one per lane.
pub const MAX_TOP_K: u32 = 32;
/// Most groups: one per lane.
pub const MAX_GROUPS: u32 = 32;
/// Tokens of a block, a warp each.
pub const WARPS: u32 = 4;
/// Most tokens whose pairs are sorted too: those of the one block, a warp each.
pub const SORT_TOKENS: u32 = 8;
/// Most experts of such tokens.
pub const MAX_SORT_EXPERTS: u32 = 1024;

/// Added to the sum that sigmoid weights are divided by.
const SIGMOID_EPS: f32 = 1e-20;

/// Where a block that sorts keeps the experts of its pairs, in shared memory, behind the keys.
pub const fn chosen_at(experts: u32) -> u32 {
    SORT_TOKENS * experts * 4
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoeRouterStage {
    /// Finds the experts of tokens, and their weights.
    Route,
    /// Sorts the pairs of tokens and experts too.
    Sort,
}

impl MoeRouterStage {
    /// Tokens of a block, a warp each.
    pub const fn warps(self) -> u32 {
        match self {
            MoeRouterStage::Route => WARPS,
            MoeRouterStage::Sort => SORT_TOKENS,
        }
    }

    /// Dynamic shared memory of a block in bytes.
    pub const fn smem_bytes(self, experts: u32) -> u32 {
        match self {
            MoeRouterStage::Route => WARPS * experts * 4,
            MoeRouterStage::Sort => chosen_at(experts) + SORT_TOKENS * MAX_TOP_K * 4,
        }
    }
}

const _: () = assert!(MoeRouterStage::Route.smem_bytes(MAX_EXPERTS) <= 48 << 10);
const _: () = assert!(MoeRouterStage::Sort.smem_bytes(MAX_SORT_EXPERTS) <= 48 << 10);

/// How the logits of a token become scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    is_sigmoid: bool,
    /// For softmax: the largest logit, and the sum of e^(logit − max).
    max: f32,
    sum: f32,
}

impl Scores {
    /// 1 / (1 + e^−logit).
    pub const SIGMOID: Scores = Scores { is_sigmoid: true, max: 0.0, sum: 1.0 };

    /// Softmax, given the largest logit (NaN apart) and the sum of [`Scores::power`] over all of them.
    #[inline(always)]
    pub const fn softmax(max: f32, sum: f32) -> Self {
        Scores { is_sigmoid: false, max, sum }
    }

    /// e^(logit − max).
    #[inline(always)]
    pub const fn power(logit: f32, max: f32) -> f32 {
        exp_neg(logit - max)
    }

    /// The score of a logit.
    #[inline(always)]
    pub const fn of(&self, logit: f32) -> f32 {
        if self.is_sigmoid { sigmoid(logit) } else { Self::power(logit, self.max) / self.sum }
    }
}

/// The weight of a chosen expert, not rounded yet, from its score and the sum of the chosen ones' scores.
#[inline(always)]
pub const fn weight(score: f32, sum: f32, options: u32, scale: f32) -> f32 {
    let eps = if options & SIGMOID != 0 { SIGMOID_EPS } else { 0.0 };
    let share = if options & NORMALISED != 0 { score / (sum + eps) } else { score };
    share * scale
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct MoeRouterVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the logits.
    pub dtype: DType,
    /// What it does.
    pub stage: MoeRouterStage,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! moe_router_table {
    ($callback:path) => {
        $callback! {
            moe_router_f32__warp__sm61 => f32, F32, Route;
            moe_router_f16__warp__sm61 => f16, F16, Route;
            moe_router_bf16__warp__sm61 => bf16, BF16, Route;
            moe_router_f32__sort__sm61 => f32, F32, Sort;
            moe_router_f16__sort__sm61 => f16, F16, Sort;
            moe_router_bf16__sort__sm61 => bf16, BF16, Sort;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $stage:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[MoeRouterVariant] = &[$(MoeRouterVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            stage: MoeRouterStage::$stage,
        }),*];
    };
}
moe_router_table!(variants);
