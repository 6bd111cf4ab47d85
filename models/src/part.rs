//! What of a model a rank of a group has: heads of the mixers, columns of the gated MLPs and of each expert or some of
//! the experts, tokens of the head. What is behind them, a matrix that takes a rank's heads or columns, gives a rank's
//! part of a sum; norms, routers, embedding, latent rows and vision tower are the same at all ranks.

use std::ops::Range;

use host::Error;
use host::group::Communicator;

use super::config::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, LatentConfig, MixerConfig, MlpConfig,
};

/// Which places of a dimension are taken: ranges of `of`, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) of: usize,
    pub(super) ranges: Vec<Range<usize>>,
}

impl Cut {
    pub(super) fn range(of: usize, range: Range<usize>) -> Self {
        Cut { of, ranges: vec![range] }
    }

    /// Nothing of a dimension of this size.
    pub(super) fn none(of: usize) -> Self {
        Cut { of, ranges: Vec::new() }
    }

    /// Whether this place is taken.
    pub(super) fn contains(&self, place: usize) -> bool {
        self.ranges.iter().any(|range| range.contains(&place))
    }

    /// How many are taken.
    pub(super) fn len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether all are, in their order.
    pub(super) fn is_all(&self) -> bool {
        matches!(&self.ranges[..], [range] if *range == (0..self.of))
    }

    /// Each place with so many inside of it.
    pub(super) fn times(&self, width: usize) -> Cut {
        let ranges = self.ranges.iter().map(|range| range.start * width..range.end * width).collect();
        Cut { of: self.of * width, ranges }
    }

    /// The same places again in each of these, which are dimensions of this size that follow each other.
    pub(super) fn repeated(&self, times: impl Into<Cut>) -> Cut {
        let times: Cut = times.into();
        let of = |index: usize| {
            let start = index * self.of;
            self.ranges.iter().map(move |range| start + range.start..start + range.end)
        };
        // What is taken as a whole stays so.
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for range in times.ranges.iter().cloned().flatten().flat_map(of) {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        Cut { of: self.of * times.of, ranges }
    }

    /// Which of them are in one of so many equal parts, counted from the part's start.
    pub(super) fn within(&self, parts: usize, part: usize) -> Cut {
        let size = self.of / parts;
        let (start, end) = (part * size, (part + 1) * size);
        let own = self.ranges.iter().map(|range| range.start.max(start)..range.end.min(end));
        let own = own.filter(|range| !range.is_empty()).map(|range| range.start - start..range.end - start);
        Cut { of: size, ranges: own.collect() }
    }
}

impl From<usize> for Cut {
    fn from(of: usize) -> Self {
        Cut::range(of, 0..of)
    }
}

/// How the ranks of a group share the experts of a mixture. Tokens are at all ranks either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpertSharding {
    /// Each rank has some columns of every expert: all have as much to do, whatever experts the tokens choose.
    #[default]
    Tensor,
    /// Each rank has some experts as a whole: fewer and larger products, of experts that no border cuts, but ranks wait
    /// for the one whose experts have the most tokens. With fewer experts than ranks as [`ExpertSharding::Tensor`].
    Expert,
}

impl std::str::FromStr for ExpertSharding {
    type Err = Error;

    /// `tensor` or `expert`.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "tensor" => Ok(ExpertSharding::Tensor),
            "expert" => Ok(ExpertSharding::Expert),
            _ => Err(Error::invalid("Model", "experts", "tensor or expert", format!("{text:?}"))),
        }
    }
}

/// A rank, and how it shares a model with the others of its group.
#[derive(Clone, Copy, Debug)]
pub struct Shard<'a> {
    pub(super) rank: &'a Communicator,
    pub(super) experts: ExpertSharding,
}

impl<'a> From<&'a Communicator> for Shard<'a> {
    fn from(rank: &'a Communicator) -> Self {
        Shard { rank, experts: ExpertSharding::default() }
    }
}

impl Shard<'_> {
    /// With experts shared in this way.
    #[must_use]
    pub fn with_experts(self, experts: ExpertSharding) -> Self {
        Shard { experts, ..self }
    }

    /// The part that it has of a model, of whose weights `unit` neighbouring columns belong together.
    pub(super) fn part(&self, unit: usize) -> Part {
        Part { rank: self.rank.rank(), size: self.rank.size(), unit, experts: self.experts }
    }
}

/// A rank's place in a group, and what its weights allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    rank: usize,
    size: usize,
    experts: ExpertSharding,
    /// Columns of quantised weights that share a scale, and rows, where that bounds where they may be cut; else 1.
    unit: usize,
}

/// Columns of an MLP that are best kept together: a tile of the products, or less where there are too few.
const COLUMNS: [usize; 5] = [128, 64, 32, 16, 8];

impl Part {
    /// All of it.
    pub(super) const WHOLE: Part = Part::new(0, 1);

    pub(super) const fn new(rank: usize, size: usize) -> Self {
        Part { rank, size, unit: 1, experts: ExpertSharding::Tensor }
    }

    /// Whether it is the rank that adds what is to be added once.
    pub(super) fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// So many things, as evenly as can be.
    fn share(&self, count: usize) -> Range<usize> {
        count * self.rank / self.size..count * (self.rank + 1) / self.size
    }

    /// Query heads and key heads. Where there are fewer key heads than ranks, several ranks have the same one, each
    /// for some of its query heads.
    pub(super) fn heads(&self, config: &AttentionConfig) -> [Range<usize>; 2] {
        let &AttentionConfig { heads_q, heads_kv, .. } = config;
        let group = heads_q / heads_kv.max(1);
        if heads_kv >= self.size {
            let kv = self.share(heads_kv);
            return [kv.start * group..kv.end * group, kv];
        }
        let kv = self.rank * heads_kv / self.size;
        let first = |kv: usize| (kv * self.size).div_ceil(heads_kv);
        let among = Part { rank: self.rank - first(kv), size: first(kv + 1) - first(kv), ..*self };
        let q = among.share(group);
        let q = kv * group + q.start..kv * group + q.end;
        let kv = if q.is_empty() { kv..kv } else { kv..kv + 1 };
        [q, kv]
    }

    /// Heads of latent attention.
    pub(super) fn latent_heads(&self, config: &LatentConfig) -> Range<usize> {
        self.share(config.heads)
    }

    /// Key heads of a delta net; each one's value heads come with it.
    pub(super) fn key_heads(&self, config: &DeltaNetConfig) -> Range<usize> {
        self.share(config.heads_k)
    }

    /// Columns of a gated MLP.
    pub(super) fn columns(&self, config: &MlpConfig) -> Range<usize> {
        let size = config.intermediate_size;
        let fits = |unit: &usize| unit.is_multiple_of(self.unit) && size.is_multiple_of(*unit);
        let even = COLUMNS.into_iter().find(|unit| fits(unit) && (size / unit).is_multiple_of(self.size));
        let enough = || COLUMNS.into_iter().find(|unit| fits(unit) && size / unit >= self.size);
        let unit = even.or_else(enough).unwrap_or(self.unit);
        let units = self.share(size.div_ceil(unit));
        units.start * unit..(units.end * unit).min(size)
    }

    /// Experts of a mixture of so many.
    pub(super) fn experts(&self, count: usize) -> Range<usize> {
        if self.has_whole_experts(count) { self.share(count) } else { 0..count }
    }

    /// Columns of each expert of a mixture of so many.
    pub(super) fn expert_columns(&self, count: usize, expert: &MlpConfig) -> Range<usize> {
        if self.has_whole_experts(count) { 0..expert.intermediate_size } else { self.columns(expert) }
    }

    fn has_whole_experts(&self, count: usize) -> bool {
        self.experts == ExpertSharding::Expert && count >= self.size
    }

    /// Tokens that the head has a row for: as many at each rank, but for the last ones.
    pub(super) fn tokens(&self, vocab_size: usize) -> Range<usize> {
        let most = vocab_size.div_ceil(self.size);
        (self.rank * most).min(vocab_size)..((self.rank + 1) * most).min(vocab_size)
    }

    /// What is left of a decoder here.
    pub(super) fn of(&self, config: &DecoderConfig) -> DecoderConfig {
        let mut config = config.clone();
        for layer in &mut config.layers {
            match &mut layer.mixer {
                MixerConfig::Attention(mixer) => {
                    let [q, kv] = self.heads(mixer);
                    (mixer.heads_q, mixer.heads_kv) = (q.len(), kv.len());
                }
                MixerConfig::DeltaNet(mixer) => {
                    let group = mixer.heads_v / mixer.heads_k.max(1);
                    let keys = self.key_heads(mixer).len();
                    (mixer.heads_k, mixer.heads_v) = (keys, keys * group);
                }
                MixerConfig::Latent(mixer) => mixer.heads = self.latent_heads(mixer).len(),
            }
            let cut = |mlp: &mut MlpConfig| mlp.intermediate_size = self.columns(mlp).len();
            match &mut layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => cut(mlp),
                FeedForwardConfig::Moe(moe) => {
                    let inner = self.expert_columns(moe.num_experts, &moe.expert);
                    moe.expert.intermediate_size = inner.len();
                    if let Some(shared) = &mut moe.shared {
                        cut(&mut shared.mlp);
                    }
                }
            }
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use abi::ops::glu::Activation;

    fn attention(heads_q: usize, heads_kv: usize) -> AttentionConfig {
        AttentionConfig {
            heads_q,
            heads_kv,
            head_dim: 64,
            bias: false,
            output_bias: false,
            qk_norm: false,
            window: None,
            output_gate: false,
        }
    }

    /// Every query head is somewhere once, beside the key head that it attends to.
    #[test]
    fn heads_are_dealt_out_once() {
        for (heads_q, heads_kv) in [(4, 2), (16, 8), (32, 8), (32, 4), (16, 2), (20, 20), (4, 1), (9, 3)] {
            let (config, group) = (attention(heads_q, heads_kv), heads_q / heads_kv);
            for size in 1..=33 {
                let mut next = 0;
                for rank in 0..size {
                    let [q, kv] = Part::new(rank, size).heads(&config);
                    assert_eq!(q.start, if q.is_empty() { q.end } else { next });
                    next = if q.is_empty() { next } else { q.end };
                    assert_eq!(q.is_empty(), kv.is_empty());
                    let local = q.len().checked_div(kv.len()).unwrap_or(0);
                    for (index, head) in q.clone().enumerate() {
                        assert_eq!(head / group, kv.start + index / local, "{heads_q} {heads_kv} {size}");
                    }
                }
                assert_eq!(next, heads_q);
            }
        }
    }

    #[test]
    fn columns_are_cut_between_groups() {
        let table = [
            (3072, 2, 1, vec![0, 1536, 3072]),
            (768, 4, 1, vec![0, 192, 384, 576, 768]),
            // Blocks of 128: one rank has more.
            (768, 4, 128, vec![0, 128, 384, 512, 768]),
            (160, 8, 1, vec![0, 16, 32, 48, 80, 96, 112, 128, 160]),
            (256, 4, 128, vec![0, 0, 128, 128, 256]),
            (200, 3, 128, vec![0, 0, 128, 200]),
            (48, 8, 1, vec![0, 6, 12, 18, 24, 30, 36, 42, 48]),
        ];
        for (intermediate_size, size, unit, borders) in table {
            let config = MlpConfig { intermediate_size, activation: Activation::Silu };
            let cuts: Vec<_> =
                (0..size).map(|rank| Part { unit, ..Part::new(rank, size) }.columns(&config)).collect();
            let expected: Vec<_> = borders.windows(2).map(|pair| pair[0]..pair[1]).collect();
            assert_eq!(cuts, expected, "{intermediate_size} {size} {unit}");
        }
    }

    #[test]
    fn cuts() {
        let cut = Cut { of: 6, ranges: vec![1..2, 4..6] };
        assert_eq!((cut.len(), cut.is_all()), (3, false));
        assert!(Cut::from(7).is_all());
        assert_eq!(cut.times(3), Cut { of: 18, ranges: vec![3..6, 12..18] });
        assert_eq!(cut.repeated(2), Cut { of: 12, ranges: vec![1..2, 4..6, 7..8, 10..12] });
        assert_eq!(cut.repeated(Cut::range(3, 1..2)), Cut { of: 18, ranges: vec![7..8, 10..12] });
        assert!(cut.contains(5) && !cut.contains(3) && Cut::none(6).len() == 0);
        assert_eq!(Cut::from(3).repeated(2), Cut::from(6));
        assert_eq!(cut.within(2, 0), Cut::range(3, 1..2));
        assert_eq!(cut.within(2, 1), Cut::range(3, 1..3));
    }

    #[test]
    fn experts_are_dealt_out_once() {
        let expert = MlpConfig { intermediate_size: 768, activation: Activation::Silu };
        let part = |rank, size, experts| Part { experts, ..Part::new(rank, size) };
        let whole = |size: usize, count| -> Vec<_> {
            (0..size).map(|rank| part(rank, size, ExpertSharding::Expert).experts(count)).collect()
        };
        assert_eq!(whole(4, 10), [0..2, 2..5, 5..7, 7..10]);
        assert_eq!(part(1, 4, ExpertSharding::Expert).expert_columns(10, &expert), 0..768);
        // Fewer experts than ranks, or their columns: all experts.
        assert_eq!(whole(4, 3), vec![0..3; 4]);
        assert_eq!(part(1, 4, ExpertSharding::Expert).expert_columns(3, &expert), 192..384);
        assert_eq!(part(1, 4, ExpertSharding::Tensor).experts(10), 0..10);
        assert_eq!(part(1, 4, ExpertSharding::Tensor).expert_columns(10, &expert), 192..384);
    }

    #[test]
    fn tokens_are_as_many_but_for_the_last() {
        let of = |vocab, size: usize| -> Vec<_> {
            (0..size).map(|rank| Part::new(rank, size).tokens(vocab)).collect()
        };
        assert_eq!(of(384, 2), [0..192, 192..384]);
        assert_eq!(of(5, 4), [0..2, 2..4, 4..5, 5..5]);
    }
}
