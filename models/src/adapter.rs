//! LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::config::read_json;
use super::part::Cut;
use super::weights::{MAX_PROBLEMS, Weights};
use super::{ModelError, TensorProblem};

/// Largest `adapter_config.json`, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// In front of a module's name in the tensors' names.
const PREFIX: &str = "base_model.model.";

/// Keys of `adapter_config.json` without effect on what an adapter computes, or of none that its tensors' names and
/// shapes do not say.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    // How training began.
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    // Of `megatron_config`, and of `use_qalora`.
    "megatron_core",
    "qalora_group_size",
    "peft_version",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// A LoRA adapter: what it adds to a model's linear layers.
///
/// To the output of a linear layer `x · Wᵀ` an adapter adds `scale · x · Aᵀ · Bᵀ`, with `A` `[r, in]` and `B`
/// `[out, r]`, and `scale = lora_alpha / r`, or `lora_alpha / √r` with `use_rslora`.
///
/// **Files**: `adapter_config.json` and `adapter_model.safetensors`, as PEFT's `save_pretrained` writes them, in f32,
/// f16 or bf16. **Not implemented**, and refused by name: DoRA, biases, `modules_to_save`, `rank_pattern`,
/// `alpha_pattern`, initialisations that change the base model (PiSSA, OLoRA, CorDA, LoftQ), and every other key that
/// asks for something.
///
/// **Modules** of a [`Batch`](crate::Batch), in any of the layers:
///
/// | part | modules |
/// |---|---|
/// | softmax attention | `q_proj`, `k_proj`, `v_proj`, `o_proj` |
/// | delta nets | `in_proj_qkvz`, `in_proj_ba`, `out_proj` |
/// | latent attention | `q_a_proj`, `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`, `o_proj` |
/// | gated MLPs, shared experts | `gate_proj`, `up_proj`, `down_proj` |
/// | routed experts, each by itself | `experts.N.gate_proj`, `experts.N.up_proj`, `experts.N.down_proj` |
///
/// To what an adapter has no matrices of, an expert among others, it adds nothing. Adapters times experts are at most
/// 2048 where some are of routed experts. Others are refused by name: latent attention's `kv_b_proj`, which is absorbed
/// into the queries and results of all sequences alike, and routers. What is added to the weights as they are loaded
/// ([`Checkpoint::with_adapter`](crate::Checkpoint::with_adapter)) may be of any linear layer whose weight the
/// checkpoint has as a tensor of its own.
#[derive(Debug)]
pub struct Adapter {
    dir: PathBuf,
    rank: usize,
    scale: f32,
    weights: Weights,
}

impl Adapter {
    /// Opens the adapter in a folder. Its tensors are mapped, as those of [`Weights`]: the file may not be written to
    /// meanwhile. What they are of is looked at when a [`Batch`](crate::Batch) is made with it.
    ///
    /// **Errors**: [`ModelError::Missing`] and others for the files; [`ModelError::Field`] for a value that is none;
    /// [`ModelError::Unsupported`] for one that is not implemented, with its key.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("adapter_config.json");
        let config = Config::read(&read_json(&path, MAX_CONFIG_BYTES)?, &path)?;
        let weights = Weights::open_file(&dir.join("adapter_model.safetensors"))?;
        Ok(Adapter { dir: dir.into(), rank: config.rank, scale: config.scale, weights })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its rank, `r`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What its products are multiplied by.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether it adds to the module of this name.
    pub(super) fn has(&self, module: &str) -> bool {
        let [a, b] = names(module);
        self.weights.contains(&a) || self.weights.contains(&b)
    }

    /// **Errors**: [`ModelError::Tensors`] unless both matrices of a module with a weight `[rows, cols]` are there.
    fn check_module(&self, module: &str, [rows, cols]: [usize; 2]) -> Result<(), ModelError> {
        let [a, b] = names(module);
        let mut needed = self.weights.require();
        needed.tensor(&a, &[self.rank, cols]).tensor(&b, &[rows, self.rank]);
        needed.finish()
    }

    /// What it adds to the weight `[rows, cols]` of a module that it has.
    ///
    /// **Errors**: [`ModelError::Tensors`] for matrices that are missing or do not fit.
    pub(super) fn added(&self, module: &str, [rows, cols]: [usize; 2]) -> Result<Added, ModelError> {
        self.check_module(module, [rows, cols])?;
        let (rank, [a, b]) = (self.rank, names(module));
        let up = self.weights.get(&b)?.to_f32()?.into_iter().map(|value| self.scale * value).collect();
        Ok(Added { rank, down: self.weights.get(&a)?.to_f32()?, up })
    }

    /// **Errors**: [`ModelError::Tensors`] unless all of it is of matrices among these tensors.
    pub(super) fn check_modules(&self, tensors: &[(String, Vec<usize>)]) -> Result<(), ModelError> {
        let matrices = tensors.iter().filter(|(_, shape)| shape.len() == 2);
        let modules = matrices.filter_map(|(name, _)| name.strip_suffix(".weight"));
        check_used(&[self], &[modules.flat_map(names).collect()], &[])
    }

    fn unusable(&self, count: usize, problems: Vec<TensorProblem>) -> ModelError {
        ModelError::Tensors { dir: self.dir.clone(), count, problems }
    }
}

/// What an adapter adds to a weight: `up · down`.
#[derive(Clone, Debug)]
pub(super) struct Added {
    rank: usize,
    /// `[rank, cols]`
    down: Vec<f32>,
    /// `[rows, rank]`, times the scale.
    up: Vec<f32>,
}

impl Added {
    /// Rows of the weight.
    pub(super) fn rows(&self) -> usize {
        self.up.len() / self.rank
    }

    /// Columns of the weight.
    pub(super) fn cols(&self) -> usize {
        self.down.len() / self.rank
    }

    /// Adds its part of a row to the row.
    pub(super) fn add(&self, row: usize, out: &mut [f32]) {
        let factors = &self.up[row * self.rank..][..self.rank];
        for (factor, down) in std::iter::zip(factors, self.down.chunks_exact(out.len().max(1))) {
            std::iter::zip(&mut *out, down).for_each(|(out, down)| *out += factor * down);
        }
    }
}

/// The names of a module's two matrices.
fn names(module: &str) -> [String; 2] {
    ["A", "B"].map(|which| format!("{PREFIX}{module}.lora_{which}.weight"))
}

#[derive(Debug, PartialEq)]
struct Config {
    rank: usize,
    scale: f32,
}

impl Config {
    fn read(root: &Value, path: &Path) -> Result<Self, ModelError> {
        let field = |field: &str, expected: &str, got: Option<&Value>| ModelError::Field {
            path: path.into(),
            field: field.into(),
            expected: expected.into(),
            got: got.map_or_else(|| "nothing".into(), Value::to_string),
        };
        let Value::Object(map) = root else {
            return Err(field("the file's content", "an object", Some(root)));
        };
        let unsupported = |name: &str, value: &Value, supported| ModelError::Unsupported {
            path: path.into(),
            field: name.into(),
            value: value.to_string(),
            supported,
        };
        let mut is_rooted = false;
        for (name, value) in map {
            match (name.as_str(), value) {
                ("r" | "lora_alpha", _) => {}
                ("peft_type", Value::String(kind)) if kind == "LORA" => {}
                ("peft_type", _) => return Err(unsupported(name, value, &["\"LORA\""])),
                ("use_rslora", Value::Bool(rooted)) => is_rooted = *rooted,
                ("use_rslora", Value::Null) => {}
                ("use_rslora", _) => return Err(field(name, "true or false", Some(value))),
                ("bias", Value::String(bias)) if bias == "none" => {}
                ("bias", Value::Null) => {}
                ("bias", _) => return Err(unsupported(name, value, &["\"none\""])),
                // What the first steps of training began with.
                ("init_lora_weights", Value::Bool(_) | Value::Null) => {}
                ("init_lora_weights", Value::String(from))
                    if ["gaussian", "orthogonal", "eva"].contains(&&**from) => {}
                ("init_lora_weights", _) => {
                    return Err(unsupported(
                        name,
                        value,
                        &["true", "false", "\"gaussian\"", "\"orthogonal\"", "\"eva\""],
                    ));
                }
                (name, _) if HARMLESS.contains(&name) => {}
                (_, value) if asks_for_nothing(value) => {}
                _ => return Err(unsupported(name, value, &["null"])),
            }
        }
        let rank = map.get("r").and_then(Value::as_u64).and_then(|rank| usize::try_from(rank).ok());
        let rank = rank.filter(|rank| (1..=1 << 16).contains(rank));
        let rank = rank.ok_or_else(|| field("r", "an integer from 1 to 65536", map.get("r")))?;
        let alpha = map.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.abs() <= 1e6);
        let alpha = alpha.ok_or_else(|| field("lora_alpha", "a number up to 1e6", map.get("lora_alpha")))?;
        let divisor = if is_rooted { (rank as f64).sqrt() } else { rank as f64 };
        Ok(Config { rank, scale: (alpha / divisor) as f32 })
    }
}

/// Whether a key with this value might as well not be there.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Linear layers that a model has as one projection: the modules of which its rows are, above each other or in turn.
pub(super) struct Modules {
    /// Names, with the rows of each. A name may be there more than once.
    pub(super) parts: Vec<(String, Cut)>,
    pub(super) cols: usize,
    /// Whether row i of each comes before row i + 1 of any.
    pub(super) in_turn: bool,
}

/// What adapters add to a projection, `up · down`, as they are multiplied.
pub(super) struct Matrices {
    /// `[adapters, rank, cols]`
    pub(super) down: Vec<f32>,
    /// `[adapters, rows, rank]`, times each adapter's scale.
    pub(super) up: Vec<f32>,
}

impl Modules {
    /// The modules' names, each once.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in &self.parts {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    /// Rows of the projection.
    pub(super) fn rows(&self) -> usize {
        self.parts.iter().map(|(_, rows)| rows.len()).sum()
    }

    /// The rank of what these adapters add, one beside the other for each module; 0 if nothing.
    pub(super) fn rank(&self, adapters: &[&Adapter]) -> usize {
        let names = self.names();
        let of = |adapter: &&Adapter| names.iter().filter(|name| adapter.has(name)).count() * adapter.rank;
        adapters.iter().map(of).max().unwrap_or(0)
    }

    /// Whether their matrices are there and fit: to be asked before there is memory for their rank.
    ///
    /// **Errors**: [`ModelError::Tensors`] for those of a module that are missing or do not fit.
    pub(super) fn check(&self, adapters: &[&Adapter]) -> Result<(), ModelError> {
        for adapter in adapters {
            for (module, rows) in self.parts.iter().filter(|(module, _)| adapter.has(module)) {
                adapter.check_module(module, [rows.of, self.cols])?;
            }
        }
        Ok(())
    }

    /// Their matrices, which fit, of this rank, which may be larger: zeros are the rest. None if they add nothing.
    ///
    /// **Errors**: none of adapters that were checked.
    pub(super) fn read(
        &self,
        adapters: &[&Adapter],
        rank: usize,
        used: &mut [BTreeSet<String>],
    ) -> Result<Option<Matrices>, ModelError> {
        if self.rank(adapters) == 0 {
            return Ok(None);
        }
        let (rows, cols) = (self.rows(), self.cols);
        let mut down = vec![0.0; adapters.len() * rank * cols];
        let mut up = vec![0.0; adapters.len() * rows * rank];
        for (index, adapter) in adapters.iter().enumerate() {
            let mut first = 0;
            for module in self.names().into_iter().filter(|name| adapter.has(name)) {
                let [a, b] = names(module);
                let values = adapter.weights.get(&a)?.to_f32()?;
                down[(index * rank + first) * cols..][..values.len()].copy_from_slice(&values);
                let values = adapter.weights.get(&b)?.to_f32()?;
                for (row, from) in self.places(module) {
                    let own = &values[from * adapter.rank..][..adapter.rank];
                    let up = &mut up[(index * rows + row) * rank + first..][..adapter.rank];
                    std::iter::zip(up, own).for_each(|(up, own)| *up = adapter.scale * own);
                }
                first += adapter.rank;
                used[index].extend([a, b]);
            }
        }
        Ok(Some(Matrices { down, up }))
    }

    /// Rows of the projection that are a module's, with the module's rows.
    fn places(&self, module: &str) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        let mut start = 0;
        for (part, (name, rows)) in self.parts.iter().enumerate() {
            let own = rows.ranges.iter().cloned().flatten().enumerate();
            if name == module {
                let row = |at: usize| if self.in_turn { at * self.parts.len() + part } else { start + at };
                places.extend(own.map(|(at, from)| (row(at), from)));
            }
            start += rows.len();
        }
        places
    }
}

/// What is not used may be of modules whose names begin as `others` has it, which says what they are.
///
/// **Errors**: [`ModelError::Tensors`] if an adapter has tensors that no projection of the model has taken.
pub(super) fn check_used(
    adapters: &[&Adapter],
    used: &[BTreeSet<String>],
    others: &[(String, &str)],
) -> Result<(), ModelError> {
    let what = |name: &str| {
        let module = name.strip_prefix(PREFIX)?;
        others.iter().find(|(begin, _)| module.starts_with(begin)).map(|&(_, what)| what)
    };
    for (adapter, used) in std::iter::zip(adapters, used) {
        let left: Vec<&str> = adapter.weights.names().filter(|name| !used.contains(*name)).collect();
        if left.is_empty() {
            continue;
        }
        let problem = |name: &&str| TensorProblem::Unfit {
            name: (*name).into(),
            expected: "lora_A or lora_B of a linear layer that adapters can change".into(),
            got: what(name).unwrap_or("one of a part that they cannot, or that the model has not").into(),
        };
        return Err(adapter.unusable(left.len(), left.iter().take(MAX_PROBLEMS).map(problem).collect()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<Config, String> {
        let value = serde_json::from_str(text).expect("JSON");
        Config::read(&value, Path::new("adapter_config.json")).map_err(|error| error.to_string())
    }

    #[test]
    fn configurations() {
        // As PEFT 0.21.2 writes it.
        let written = r#"{
            "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": "Qwen/Qwen3-0.6B", "bias": "none", "corda_config": null,
            "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
            "inference_mode": true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null,
            "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32,
            "lora_bias": false, "lora_dropout": 0.05, "lora_ga_config": null, "megatron_config": null,
            "megatron_core": "megatron.core", "modules_to_save": null, "monteclora_config": null,
            "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 8, "rank_pattern": {},
            "revision": null, "target_modules": ["q_proj", "v_proj"], "target_parameters": null,
            "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
            "use_qalora": false, "use_rslora": false, "velora_config": null}"#;
        assert_eq!(config(written), Ok(Config { rank: 8, scale: 4.0 }));
        let rooted = r#"{"peft_type": "LORA", "r": 16, "lora_alpha": 8.0, "use_rslora": true}"#;
        assert_eq!(config(rooted), Ok(Config { rank: 16, scale: 2.0 }));
    }

    #[test]
    fn what_is_refused() {
        for (text, want) in [
            (r#"{"lora_alpha": 1}"#, "r: expected an integer from 1 to 65536, got nothing"),
            (r#"{"r": 0, "lora_alpha": 1}"#, "r: expected an integer from 1 to 65536, got 0"),
            (r#"{"r": 8}"#, "lora_alpha: expected a number up to 1e6, got nothing"),
            (r#"{"r": 8, "lora_alpha": 1, "use_rslora": 1}"#, "use_rslora: expected true or false, got 1"),
            (r#"{"use_dora": true}"#, "use_dora: true is not supported; supported: null"),
            (r#"{"bias": "all"}"#, "bias: \"all\" is not supported; supported: \"none\""),
            (
                r#"{"modules_to_save": ["lm_head"]}"#,
                "modules_to_save: [\"lm_head\"] is not supported; supported: null",
            ),
            (
                r#"{"rank_pattern": {"q_proj": 4}}"#,
                "rank_pattern: {\"q_proj\":4} is not supported; supported: null",
            ),
            (r#"{"peft_type": "IA3"}"#, "peft_type: \"IA3\" is not supported; supported: \"LORA\""),
            (r#"{"fan_in_fan_out": true}"#, "fan_in_fan_out: true is not supported; supported: null"),
            (
                r#"{"init_lora_weights": "pissa"}"#,
                "init_lora_weights: \"pissa\" is not supported; supported: true, false, \"gaussian\", \"orthogonal\", \"eva\"",
            ),
            ("[]", "the file's content: expected an object, got []"),
        ] {
            assert_eq!(config(text), Err(format!("adapter_config.json: {want}")));
        }
    }

    #[test]
    fn rows_above_each_other_and_in_turn() {
        let parts =
            vec![("a".to_owned(), Cut { of: 4, ranges: vec![1..2, 3..4] }), ("b".to_owned(), 2.into())];
        let above = Modules { parts: parts.clone(), cols: 1, in_turn: false };
        assert_eq!(above.places("a"), [(0, 1), (1, 3)]);
        assert_eq!(above.places("b"), [(2, 0), (3, 1)]);
        let in_turn = Modules { parts, cols: 1, in_turn: true };
        assert_eq!(in_turn.places("a"), [(0, 1), (2, 3)]);
        assert_eq!(in_turn.places("b"), [(1, 0), (3, 1)]);
    }
}
