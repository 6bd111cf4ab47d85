//! The bounds of a configuration that did not come through [`ModelConfig::from_json`]: its fields are public. What a
//! file may say is refused earlier, by the names of the file's keys.

use abi::ops::attention::MAX_HEAD_DIM as MAX_KEY_DIM;
use abi::ops::causal_conv1d::MAX_WIDTH;
use abi::ops::gated_delta::MAX_DIM_K;
use abi::ops::moe_router::{MAX_EXPERTS, MAX_TOP_K};
use host::Error;

use super::pixels::MAX_PIXELS;
use super::qwen3_vl::MAX_TOKEN_SIDE;
use super::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, LatentConfig, MAX_HEAD_DIM, MAX_HEADS,
    MAX_INTERMEDIATE, MAX_LAYERS, MAX_SIZE, MixerConfig, MlpConfig, ModelConfig, MoeConfig, RopeConfig,
    RopeKind, VisionConfig, YarnRope,
};

const OP: &str = "ModelConfig";
/// Widest part of a query or key.
const MAX_KEY: usize = MAX_KEY_DIM as usize;

fn invalid(argument: &'static str, expected: impl Into<String>, got: impl ToString) -> Error {
    Error::invalid(OP, argument, expected, got.to_string())
}

fn size(argument: &'static str, size: usize, most: usize) -> Result<(), Error> {
    match size {
        1.. if size <= most => Ok(()),
        _ => Err(invalid(argument, format!("1 to {most}"), size)),
    }
}

/// The width of a head, or of what stands for one.
fn width(argument: &'static str, width: usize, most: usize) -> Result<(), Error> {
    if (8..=most).contains(&width) && width.is_multiple_of(8) {
        return Ok(());
    }
    Err(invalid(argument, format!("a multiple of 8 from 8 to {most}"), width))
}

fn positive(argument: &'static str, number: f64) -> Result<(), Error> {
    if number > 0.0 && number.is_finite() {
        return Ok(());
    }
    Err(invalid(argument, "a number above 0", number))
}

/// A base of rotary frequencies.
fn base(argument: &'static str, theta: f64) -> Result<(), Error> {
    if theta > 1.0 && theta.is_finite() { Ok(()) } else { Err(invalid(argument, "a number above 1", theta)) }
}

impl ModelConfig {
    /// Whether a model can be built by these numbers: they are ones that the operators take, and fit each other.
    ///
    /// Whoever builds a model asks. **Errors**: [`Error::Invalid`] that names the field.
    pub fn check(&self) -> Result<(), Error> {
        self.decoder.check()?;
        let Some(vision) = &self.vision else { return Ok(()) };
        vision.check()?;
        let (decoder, blocks) = (&self.decoder, &vision.deepstack_blocks);
        if vision.out_hidden_size != decoder.hidden_size {
            let expected = format!("the decoder's hidden_size, {}", decoder.hidden_size);
            return Err(invalid("vision.out_hidden_size", expected, vision.out_hidden_size));
        }
        if blocks.len() > decoder.layers.len() {
            let expected = format!("at most one for each of {} decoder layers", decoder.layers.len());
            return Err(invalid("vision.deepstack_blocks", expected, blocks.len()));
        }
        let pairs = decoder.rope.rotary_dim / 2;
        if vision.mrope_section.iter().try_fold(0usize, |sum, &part| sum.checked_add(part)) != Some(pairs) {
            let expected = format!("three sizes that make up {pairs}");
            return Err(invalid("vision.mrope_section", expected, format!("{:?}", vision.mrope_section)));
        }
        Ok(())
    }
}

impl DecoderConfig {
    fn check(&self) -> Result<(), Error> {
        size("decoder.vocab_size", self.vocab_size, MAX_SIZE)?;
        size("decoder.hidden_size", self.hidden_size, MAX_SIZE)?;
        size("decoder.layers", self.layers.len(), MAX_LAYERS)?;
        size("decoder.max_position_embeddings", self.max_position_embeddings, MAX_SIZE)?;
        positive("decoder.norm.eps", self.norm.eps.into())?;
        self.rope.check()?;
        for layer in &self.layers {
            let rotated = match &layer.mixer {
                MixerConfig::Attention(attention) => attention.check().map(|()| attention.head_dim)?,
                MixerConfig::DeltaNet(net) => net.check().map(|()| usize::MAX)?,
                MixerConfig::Latent(latent) => latent.check().map(|()| latent.rope)?,
            };
            if self.rope.rotary_dim > rotated {
                let expected = format!("at most a head's width, {rotated}");
                return Err(invalid("decoder.rope.rotary_dim", expected, self.rope.rotary_dim));
            }
            match &layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => mlp.check()?,
                FeedForwardConfig::Moe(moe) => moe.check()?,
            }
        }
        Ok(())
    }
}

impl RopeConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        base("decoder.rope.theta", self.theta)?;
        if self.rotary_dim < 2 || self.rotary_dim > MAX_KEY || !self.rotary_dim.is_multiple_of(2) {
            let expected = format!("an even number from 2 to {MAX_KEY}");
            return Err(invalid("decoder.rope.rotary_dim", expected, self.rotary_dim));
        }
        let original = |context| size("decoder.rope.original_max_position_embeddings", context, MAX_SIZE);
        match self.kind {
            RopeKind::Default => Ok(()),
            RopeKind::Linear { factor } => positive("decoder.rope.factor", factor),
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                positive("decoder.rope.factor", factor)?;
                positive("decoder.rope.low_freq_factor", low_freq_factor)?;
                positive(
                    "decoder.rope.high_freq_factor - low_freq_factor",
                    high_freq_factor - low_freq_factor,
                )?;
                original(original_max_position_embeddings)
            }
            RopeKind::Yarn(YarnRope {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate: _,
            }) => {
                positive("decoder.rope.factor", factor)?;
                positive("decoder.rope.beta_fast", beta_fast)?;
                positive("decoder.rope.beta_slow", beta_slow)?;
                positive("decoder.rope.attention_factor", attention_factor)?;
                original(original_max_position_embeddings)
            }
        }
    }
}

impl AttentionConfig {
    fn check(&self) -> Result<(), Error> {
        let &AttentionConfig { heads_q, heads_kv, head_dim, window, .. } = self;
        size("attention.heads_q", heads_q, MAX_HEADS)?;
        size("attention.heads_kv", heads_kv, MAX_HEADS)?;
        if !heads_q.is_multiple_of(heads_kv) {
            return Err(invalid("attention.heads_kv", format!("a divisor of heads_q, {heads_q}"), heads_kv));
        }
        width("attention.head_dim", head_dim, MAX_HEAD_DIM)?;
        window.map_or(Ok(()), |window| size("attention.window", window, MAX_SIZE))
    }
}

impl DeltaNetConfig {
    fn check(&self) -> Result<(), Error> {
        let &DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, conv_width } = self;
        size("delta_net.heads_k", heads_k, MAX_HEADS)?;
        size("delta_net.heads_v", heads_v, MAX_HEADS)?;
        if !heads_v.is_multiple_of(heads_k) {
            return Err(invalid("delta_net.heads_v", format!("a multiple of heads_k, {heads_k}"), heads_v));
        }
        size("delta_net.dim_k", dim_k, MAX_DIM_K as usize)?;
        // As the delta rule takes them.
        size("delta_net.dim_v", dim_v, ((1 << 24) - 1) / heads_v)?;
        match conv_width {
            2.. if conv_width <= MAX_WIDTH as usize => Ok(()),
            _ => Err(invalid("delta_net.conv_width", format!("2 to {MAX_WIDTH}"), conv_width)),
        }
    }
}

impl LatentConfig {
    fn check(&self) -> Result<(), Error> {
        let &LatentConfig { heads, q_latent, latent, nope, rope, value, eps, scale, .. } = self;
        size("latent.heads", heads, MAX_HEADS)?;
        size("latent.q_latent", q_latent.unwrap_or(1), MAX_SIZE)?;
        size("latent.nope", nope, MAX_KEY)?;
        size("latent.rope", rope, MAX_KEY)?;
        width("latent.latent", latent, MAX_HEAD_DIM)?;
        width("latent.value", value, MAX_HEAD_DIM)?;
        width("latent.nope + rope", self.head_dim(), MAX_KEY)?;
        width("latent.latent + rope", self.row(), MAX_KEY)?;
        positive("latent.eps", eps.into())?;
        positive("latent.scale", scale.into())
    }
}

impl MlpConfig {
    fn check(&self) -> Result<(), Error> {
        size("mlp.intermediate_size", self.intermediate_size, MAX_INTERMEDIATE)
    }
}

impl MoeConfig {
    fn check(&self) -> Result<(), Error> {
        let &MoeConfig { num_experts, top_k, groups, scale, .. } = self;
        size("moe.num_experts", num_experts, MAX_EXPERTS as usize)?;
        size("moe.top_k", top_k, num_experts.min(MAX_TOP_K as usize))?;
        if let Some(groups) = groups {
            size("moe.groups.num_groups", groups.num_groups, num_experts)?;
            size("moe.groups.top_groups", groups.top_groups, groups.num_groups)?;
        }
        positive("moe.scale", scale.into())?;
        self.expert.check()?;
        self.shared.map_or(Ok(()), |shared| shared.mlp.check())
    }
}

impl VisionConfig {
    fn check(&self) -> Result<(), Error> {
        let &VisionConfig { depth, hidden_size, heads, intermediate_size, position_grid, .. } = self;
        size("vision.depth", depth, MAX_LAYERS)?;
        size("vision.hidden_size", hidden_size, MAX_SIZE)?;
        size("vision.heads", heads, MAX_HEADS)?;
        if !hidden_size.is_multiple_of(8 * heads) || hidden_size / heads > MAX_HEAD_DIM {
            let expected = format!("a multiple of {}, up to {MAX_HEAD_DIM} times heads", 8 * heads);
            return Err(invalid("vision.hidden_size", expected, hidden_size));
        }
        size("vision.intermediate_size", intermediate_size, MAX_SIZE)?;
        size("vision.out_hidden_size", self.out_hidden_size, MAX_SIZE)?;
        size("vision.position_grid", position_grid, MAX_SIZE.isqrt())?;
        base("vision.rope_theta", self.rope_theta)?;
        self.check_pixels()?;
        size(
            "vision.hidden_size · merge_size²",
            hidden_size.saturating_mul(self.patches_per_token()),
            MAX_SIZE,
        )?;
        let blocks = &self.deepstack_blocks;
        if !blocks.is_sorted_by(|a, b| a < b) || blocks.last().is_some_and(|&last| last >= depth) {
            let expected = format!("blocks below {depth}, ascending");
            return Err(invalid("vision.deepstack_blocks", expected, format!("{} of them", blocks.len())));
        }
        Ok(())
    }

    /// What cutting images into patches goes by.
    pub(crate) fn check_pixels(&self) -> Result<(), Error> {
        let &VisionConfig { channels, temporal_patch_size, patch_size, merge_size, ref pixels, .. } = self;
        size("vision.channels", channels, MAX_SIZE)?;
        size("vision.temporal_patch_size", temporal_patch_size, MAX_SIZE)?;
        size("vision.merge_size", merge_size, MAX_TOKEN_SIDE)?;
        size("vision.patch_size", patch_size, MAX_TOKEN_SIDE / merge_size)?;
        size("vision.patch_len", self.patch_len(), MAX_SIZE)?;
        size("vision.pixels.min_pixels", pixels.min_pixels, pixels.max_pixels)?;
        size("vision.pixels.max_pixels", pixels.max_pixels, MAX_PIXELS)?;
        for (argument, list) in [("vision.pixels.mean", &pixels.mean), ("vision.pixels.std", &pixels.std)] {
            if list.len() != 1 && list.len() != channels {
                let expected = format!("one number, or one for each of {channels} channels");
                return Err(invalid(argument, expected, list.len()));
            }
        }
        pixels.std.iter().try_for_each(|&std| positive("vision.pixels.std", std.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use abi::DType;

    use super::*;
    use crate::Model;

    fn configs() -> Vec<ModelConfig> {
        let names = ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "qwen3_vl"];
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        names.iter().map(|name| ModelConfig::from_dir(&folder.join(name)).unwrap()).collect()
    }

    /// Every size of a configuration.
    fn sizes(config: &mut ModelConfig) -> Vec<&mut usize> {
        let ModelConfig { decoder, vision, .. } = config;
        let mut all =
            vec![&mut decoder.vocab_size, &mut decoder.hidden_size, &mut decoder.max_position_embeddings];
        all.push(&mut decoder.rope.rotary_dim);
        for layer in &mut decoder.layers {
            match &mut layer.mixer {
                MixerConfig::Attention(AttentionConfig { heads_q, heads_kv, head_dim, window, .. }) => {
                    all.extend([heads_q, heads_kv, head_dim]);
                    all.extend(window);
                }
                MixerConfig::DeltaNet(net) => {
                    let DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, conv_width } = net;
                    all.extend([heads_k, heads_v, dim_k, dim_v, conv_width]);
                }
                MixerConfig::Latent(LatentConfig { heads, q_latent, latent, nope, rope, value, .. }) => {
                    all.extend([heads, latent, nope, rope, value]);
                    all.extend(q_latent);
                }
            }
            match &mut layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => all.push(&mut mlp.intermediate_size),
                FeedForwardConfig::Moe(MoeConfig { num_experts, top_k, expert, shared, .. }) => {
                    all.extend([num_experts, top_k, &mut expert.intermediate_size]);
                    all.extend(shared.as_mut().map(|shared| &mut shared.mlp.intermediate_size));
                }
            }
        }
        if let Some(vision) = vision {
            let VisionConfig {
                depth, hidden_size, heads, intermediate_size, channels, out_hidden_size, ..
            } = vision;
            all.extend([depth, hidden_size, heads, intermediate_size, channels, out_hidden_size]);
            all.extend([&mut vision.temporal_patch_size, &mut vision.patch_size, &mut vision.merge_size]);
            all.push(&mut vision.position_grid);
            all.extend(&mut vision.deepstack_blocks);
            all.extend(&mut vision.mrope_section);
            all.extend([&mut vision.pixels.min_pixels, &mut vision.pixels.max_pixels]);
        }
        all
    }

    /// Whatever stands in a public field: an error that names it, or a model; nothing wraps, and nothing is allocated
    /// by it.
    #[test]
    fn any_size_is_an_error_or_sound() {
        for config in configs() {
            config.check().unwrap();
            for index in 0..sizes(&mut config.clone()).len() {
                for value in [0, 1, 2, 3, 7, 513, 1 << 16, MAX_SIZE, MAX_SIZE + 1, 1 << 62, usize::MAX] {
                    let mut changed = config.clone();
                    *sizes(&mut changed)[index] = value;
                    let is_sound = changed.check().is_ok();
                    changed.decoder.cache_bytes(DType::F32, usize::MAX);
                    let rope = changed.decoder.rope;
                    assert_eq!(rope.inv_freq().is_ok(), rope.check().is_ok());
                    assert_eq!(Model::tensors(&changed).is_ok(), is_sound, "{index}: {value}");
                    if let Some(vision) = &changed.vision {
                        let _ = (vision.patch_len(), vision.patches_per_token());
                        let _ = vision.resized(480, 640);
                        // A patch of so many frames is as large as that.
                        if vision.temporal_patch_size <= 513 || vision.check_pixels().is_err() {
                            let _ = vision.patches(32, 32, &[&[0; 32 * 32 * 3]]);
                        }
                    }
                    if !is_sound {
                        let device = host::Device::cpu();
                        let random = Model::random(&device, changed, DType::F32, 1).unwrap_err().to_string();
                        assert!(random.starts_with("ModelConfig: "), "{random}");
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_and_lists() {
        type Change = fn(&mut ModelConfig);
        let message = |change: Change| {
            let mut config = configs().swap_remove(4);
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        let cases: [(Change, &str); 6] = [
            (|c| c.decoder.layers.clear(), "decoder.layers: expected 1 to 1024, got 0"),
            (|c| c.decoder.rope.theta = f64::NAN, "decoder.rope.theta: expected a number above 1, got NaN"),
            (|c| c.decoder.norm.eps = f32::INFINITY, "decoder.norm.eps: expected a number above 0, got inf"),
            (
                |c| c.decoder.rope.kind = RopeKind::Linear { factor: 0.0 },
                "decoder.rope.factor: expected a number above 0, got 0",
            ),
            (
                |c| c.vision.iter_mut().for_each(|vision| vision.deepstack_blocks = vec![1, 0]),
                "vision.deepstack_blocks: expected blocks below 3, ascending, got 2 of them",
            ),
            (
                |c| c.vision.iter_mut().for_each(|vision| vision.pixels.std = vec![]),
                "vision.pixels.std: expected one number, or one for each of 3 channels, got 0",
            ),
        ];
        for (change, expected) in cases {
            assert_eq!(message(change), format!("ModelConfig: {expected}"));
        }
    }
}
