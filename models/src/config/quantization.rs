//! `quantization_config`: which modules of a checkpoint are quantised, and how.

use std::path::PathBuf;

use host::ops::matmul::Activations;
use regex::bytes::{Regex, RegexBuilder};
use serde_json::Value;

use super::fields::{Fields, Seen};
use crate::ModelError;

/// How the matrices of a checkpoint are quantised, and which file says so.
#[derive(Debug)]
pub(crate) struct QuantConfig {
    modules: Modules,
    activations: Activations,
    path: PathBuf,
    /// The field that names the method.
    field: String,
    method: String,
}

#[derive(Debug)]
struct Modules {
    groups: Vec<Group>,
    /// Modules that are not.
    skipped: Vec<Pattern>,
    /// Fields that say what is not done.
    undone: Vec<String>,
}

#[derive(Debug)]
struct Group {
    /// None are all modules.
    targets: Option<Vec<Pattern>>,
    scheme: Scheme,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scheme {
    /// Bytes, and `weight_scale_inv` or `weight_scale`.
    Fp8 {
        block: Option<[usize; 2]>,
    },
    Gptq {
        bits: u32,
        group: Option<usize>,
        is_v1: bool,
    },
    Awq {
        group: Option<usize>,
    },
    /// `…_blocks` and `…_scales`.
    Mxfp4Blocks,
    /// Of compressed-tensors: integers in words.
    Packed {
        bits: u32,
        group: Option<usize>,
        is_symmetric: bool,
    },
    /// Bytes, and `weight_scale`; of integers perhaps for rows that become int8 too.
    Bytes {
        block: Option<[usize; 2]>,
        rows_become_int8: bool,
    },
    Nvfp4Packed,
    Mxfp4Packed,
    Nvfp4Modelopt,
}

/// A pattern of modules' names.
#[derive(Debug)]
enum Pattern {
    /// Whole parts of a name, between dots; `*` stands for anything.
    Parts(String),
    /// From a name's beginning on.
    Regex(Regex),
    /// The whole name.
    Exact(String),
    /// A class of modules. Only linear layers are quantised, so of all classes that one is known.
    Linear,
}

impl Pattern {
    fn matches(&self, module: &str) -> bool {
        match self {
            Pattern::Exact(name) => name == module,
            Pattern::Regex(regex) => regex.is_match(module.as_bytes()),
            Pattern::Linear => true,
            Pattern::Parts(glob) => {
                let starts = module.match_indices('.').map(|(dot, _)| dot + 1);
                [0].into_iter()
                    .chain(starts)
                    .any(|start| matches_parts(glob.as_bytes(), &module.as_bytes()[start..]))
            }
        }
    }
}

/// Whether a glob matches a text up to a dot or its end. In the product of both lengths at most.
fn matches_parts(glob: &[u8], text: &[u8]) -> bool {
    let (mut at, mut place) = (0, 0);
    let mut last_star = None;
    loop {
        if at == glob.len() && (place == text.len() || text[place] == b'.') {
            return true;
        }
        if at < glob.len() && glob[at] == b'*' {
            last_star = Some((at, place));
            at += 1;
        } else if at < glob.len() && place < text.len() && glob[at] == text[place] {
            (at, place) = (at + 1, place + 1);
        } else if let Some((star, from)) = last_star
            && from < text.len()
        {
            // The star takes a byte more.
            last_star = Some((star, from + 1));
            (at, place) = (star + 1, from + 1);
        } else {
            return false;
        }
    }
}

impl Modules {
    /// How this module is quantised, if it is.
    fn scheme_of(&self, module: &str) -> Option<Scheme> {
        if self.skipped.iter().any(|pattern| pattern.matches(module)) {
            return None;
        }
        let with = |is_class: bool| {
            self.groups.iter().find(|group| match &group.targets {
                None => is_class,
                Some(targets) => targets
                    .iter()
                    .any(|target| matches!(target, Pattern::Linear) == is_class && target.matches(module)),
            })
        };
        // A name says more than a class.
        with(false).or_else(|| with(true)).map(|group| group.scheme)
    }
}

/// What names of tensors end with, one of which every method has.
const MARKS: [&str; 6] =
    [".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks", "_scales"];

impl QuantConfig {
    /// What becomes of the rows that the weights are multiplied with.
    pub(crate) fn activations(&self) -> Activations {
        self.activations
    }

    /// Fields that say what is not done: of rows that are to be quantised in a way that none are here.
    pub(crate) fn undone(&self) -> &[String] {
        &self.modules.undone
    }

    /// Whether rows become int8 before they are multiplied with this module's weight.
    pub(crate) fn rows_become_int8(&self, module: &str) -> bool {
        matches!(self.scheme_of(module), Some(Scheme::Bytes { rows_become_int8: true, .. }))
    }

    /// How this module is quantised, if it is.
    pub(crate) fn scheme_of(&self, module: &str) -> Option<Scheme> {
        self.modules.scheme_of(module)
    }

    /// Refuses a checkpoint of which nothing is quantised, though this says that something is: transformers takes
    /// such weights for missing, and goes on with random ones or with bits of another type. Names, and whether the
    /// tensor is of floats.
    pub(crate) fn check_tensors<'n>(
        &self,
        mut tensors: impl Iterator<Item = (&'n str, bool)>,
    ) -> Result<(), ModelError> {
        let is_quantised =
            |(name, is_float): (&str, bool)| !is_float || MARKS.iter().any(|mark| name.ends_with(mark));
        if self.modules.groups.is_empty() || tensors.any(is_quantised) {
            return Ok(());
        }
        Err(ModelError::Field {
            path: self.path.clone(),
            field: self.field.clone(),
            expected: format!("tensors that are quantised by {}, or no such field", self.method),
            got: "tensors of floats alone".into(),
        })
    }

    /// Whether some tensors are in blocks of gpt-oss.
    pub(crate) fn has_blocks(&self) -> bool {
        self.modules.groups.iter().any(|group| group.scheme == Scheme::Mxfp4Blocks)
    }

    /// From `config.json`, where it is at the top or with the decoder's fields; `None` if weights are not quantised.
    pub(crate) fn read(root: &Value, path: &std::path::Path) -> Result<Option<Self>, ModelError> {
        let seen = Seen::default();
        let top = Fields::top(root, path, &seen)?;
        let text = top.get("text_config").and_then(Value::as_object);
        let text = text.map(|map| top.inside("text_config.", map));
        for place in [Some(&top), text.as_ref()].into_iter().flatten() {
            for key in ["quantization_config", "compression_config"] {
                if let Some(fields) = place.object(key)? {
                    return Self::of(&fields);
                }
            }
        }
        Ok(None)
    }

    /// From a file of its own, as older tools of AWQ, GPTQ and modelopt write beside `config.json`.
    pub(crate) fn read_own(root: &Value, path: &std::path::Path) -> Result<Option<Self>, ModelError> {
        let seen = Seen::default();
        let top = Fields::top(root, path, &seen)?;
        match top.nullable("quantization", "an object", Value::as_object)? {
            Some(map) => {
                let fields = top.inside("quantization.", map);
                Ok(Some(Self::by("modelopt", "quant_algo", &fields, modelopt(&fields)?)))
            }
            None if top.has("quant_method") => Self::of(&top),
            None if top.has("desc_act") => Ok(Some(Self::by("gptq", "desc_act", &top, gptq(&top)?))),
            None if top.has("w_bit") || top.has("version") => {
                let key = if top.has("w_bit") { "w_bit" } else { "version" };
                Ok(Some(Self::by("awq", key, &top, awq(&top)?)))
            }
            None => Ok(None),
        }
    }

    fn by(method: &str, key: &str, fields: &Fields, modules: Modules) -> Self {
        let field = format!("{}{key}", fields.prefix());
        let activations = Activations::AsGiven;
        QuantConfig { modules, activations, path: fields.path.into(), field, method: method.into() }
    }

    fn of(fields: &Fields) -> Result<Option<Self>, ModelError> {
        const METHODS: &[&str] = &["fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "modelopt"];
        let (method, key) = match fields.nullable("quant_method", "a string", Value::as_str)? {
            Some(method) => (method, "quant_method"),
            None if fields.has("config_groups") => ("compressed-tensors", "config_groups"),
            None => (fields.required("quant_method", "a string", Value::as_str)?, "quant_method"),
        };
        let mut rows = Activations::AsGiven;
        let modules = match method {
            "fp8" => {
                rows = activations(fields)?;
                fp8(fields)?
            }
            "gptq" => gptq(fields)?,
            "awq" => awq(fields)?,
            "mxfp4" => Modules {
                groups: vec![Group { targets: None, scheme: Scheme::Mxfp4Blocks }],
                skipped: parts(fields, &["modules_to_not_convert"])?,
                undone: Vec::new(),
            },
            "compressed-tensors" => match compressed(fields)? {
                Some((modules, activations)) => {
                    rows = activations;
                    modules
                }
                None => return Ok(None),
            },
            "modelopt" => modelopt(fields)?,
            other => return Err(fields.unsupported("quant_method", other.into(), METHODS)),
        };
        Ok(Some(QuantConfig { activations: rows, ..Self::by(method, key, fields, modules) }))
    }
}

/// The modules that a list under the first of these keys names.
fn parts(fields: &Fields, keys: &[&str]) -> Result<Vec<Pattern>, ModelError> {
    for key in keys {
        if let Some(names) = fields.nullable(key, "a list of names", strings)? {
            return Ok(names.into_iter().map(|name| Pattern::Parts(name.into())).collect());
        }
    }
    Ok(Vec::new())
}

fn strings(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}

/// A group of so many columns; −1 is all of them.
fn group_size(fields: &Fields, key: &str) -> Result<Option<usize>, ModelError> {
    let size = |value: &Value| match value.as_i64() {
        Some(-1) => Some(None),
        Some(size @ 1..=0x7fff_ffff) => Some(Some(size as usize)),
        _ => None,
    };
    Ok(fields.nullable(key, "a size, or -1", size)?.flatten())
}

fn block(fields: &Fields, key: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let sides = |value: &Value| {
        let side =
            |side: &Value| usize::try_from(side.as_u64()?).ok().filter(|side| (1..1 << 31).contains(side));
        let sides: Option<Vec<usize>> = value.as_array()?.iter().map(side).collect();
        <[usize; 2]>::try_from(sides?).ok()
    };
    fields.nullable(key, "a list of two sizes", sides)
}

/// What the method fp8 says of the rows that weights are multiplied with. With scales of the file's own, which `static`
/// is, they are multiplied as they are.
fn activations(fields: &Fields) -> Result<Activations, ModelError> {
    const SCHEMES: &[&str] = &["dynamic", "static"];
    match fields.nullable("activation_scheme", "a string", Value::as_str)? {
        Some("dynamic") => Ok(Activations::Fp8),
        None | Some("static") => Ok(Activations::AsGiven),
        Some(other) => Err(fields.unsupported("activation_scheme", other.into(), SCHEMES)),
    }
}

fn fp8(fields: &Fields) -> Result<Modules, ModelError> {
    for key in ["fmt"] {
        if let Some(format) = fields.nullable(key, "a string", Value::as_str)?
            && format != "e4m3"
        {
            return Err(fields.unsupported(key, format.into(), &["e4m3"]));
        }
    }
    // With scales of the file's own rows are multiplied as they are.
    let is_static = fields.nullable("activation_scheme", "a string", Value::as_str)? == Some("static");
    let undone = is_static.then(|| format!("{}activation_scheme", fields.prefix())).into_iter().collect();
    let converted = fields.nullable("modules_to_convert", "a list of names", strings)?;
    let targets = converted.map(|names| names.into_iter().map(|name| Pattern::Parts(name.into())).collect());
    Ok(Modules {
        groups: vec![Group { targets, scheme: Scheme::Fp8 { block: block(fields, "weight_block_size")? } }],
        skipped: parts(fields, &["modules_to_not_convert", "ignored_layers"])?,
        undone,
    })
}

fn gptq(fields: &Fields) -> Result<Modules, ModelError> {
    const FORMATS: &[&str] = &["gptq", "gptq_v2"];
    let mut is_v1 = true;
    for key in ["checkpoint_format", "format"] {
        match fields.nullable(key, "a string", Value::as_str)? {
            None => continue,
            Some("gptq") => {}
            Some("gptq_v2") => is_v1 = false,
            Some(other) => return Err(fields.unsupported(key, other.into(), FORMATS)),
        }
        break;
    }
    if let Some(packed) = fields.nullable("pack_dtype", "a string", Value::as_str)?
        && packed != "int32"
    {
        return Err(fields.unsupported("pack_dtype", packed.into(), &["int32"]));
    }
    let bits = gptq_bits(fields, None)?;
    let group = group_size(fields, "group_size")?;
    let (mut groups, mut skipped) = (Vec::new(), parts(fields, &["modules_to_not_convert"])?);
    let dynamic = fields.nullable("dynamic", "an object", |value| match value {
        Value::Bool(false) => Some(None),
        other => other.as_object().map(Some),
    })?;
    for (pattern, value) in dynamic.flatten().into_iter().flatten() {
        if let Some(pattern) = pattern.strip_prefix("-:") {
            skipped.push(regex(fields, "dynamic", pattern)?);
            continue;
        }
        let pattern = regex(fields, "dynamic", pattern.strip_prefix("+:").unwrap_or(pattern))?;
        let Some(map) = value.as_object() else {
            return Err(fields.error("dynamic", "objects", value.to_string()));
        };
        let own = fields.inside(fields.prefix(), map);
        let scheme = Scheme::Gptq {
            bits: gptq_bits(&own, Some(bits))?,
            group: if map.contains_key("group_size") { group_size(&own, "group_size")? } else { group },
            is_v1,
        };
        groups.push(Group { targets: Some(vec![pattern]), scheme });
    }
    groups.push(Group { targets: None, scheme: Scheme::Gptq { bits, group, is_v1 } });
    Ok(Modules { groups, skipped, undone: Vec::new() })
}

/// Integers are taken that divide a word into bytes or halves of them.
fn gptq_bits(fields: &Fields, default: Option<u32>) -> Result<u32, ModelError> {
    match (fields.integer("bits", 1..=32)?, default) {
        (Some(4), _) => Ok(4),
        (Some(8), _) => Ok(8),
        (Some(other), _) => Err(fields.unsupported("bits", other.to_string(), &["4", "8"])),
        (None, Some(default)) => Ok(default),
        (None, None) => Err(fields.error("bits", "4 or 8", "nothing".into())),
    }
}

fn awq(fields: &Fields) -> Result<Modules, ModelError> {
    for key in ["version", "format"] {
        if let Some(version) = fields.nullable(key, "a string", Value::as_str)? {
            if !version.eq_ignore_ascii_case("gemm") {
                return Err(fields.unsupported(key, version.into(), &["gemm"]));
            }
            break;
        }
    }
    for key in ["bits", "w_bit"] {
        if let Some(bits) = fields.integer(key, 1..=32)?
            && bits != 4
        {
            return Err(fields.unsupported(key, bits.to_string(), &["4"]));
        }
    }
    let key = if fields.has("q_group_size") { "q_group_size" } else { "group_size" };
    Ok(Modules {
        groups: vec![Group { targets: None, scheme: Scheme::Awq { group: group_size(fields, key)? } }],
        skipped: parts(fields, &["modules_to_not_convert"])?,
        undone: Vec::new(),
    })
}

fn modelopt(fields: &Fields) -> Result<Modules, ModelError> {
    let algorithm = fields.required("quant_algo", "a string", Value::as_str)?;
    let scheme = match algorithm {
        "NVFP4" => {
            if let Some(group) = fields.nullable("group_size", "a size", Value::as_u64)?
                && group != 16
            {
                return Err(fields.unsupported("group_size", group.to_string(), &["16"]));
            }
            Scheme::Nvfp4Modelopt
        }
        "FP8" => Scheme::Bytes { block: None, rows_become_int8: false },
        other => return Err(fields.unsupported("quant_algo", other.into(), &["NVFP4", "FP8"])),
    };
    Ok(Modules {
        groups: vec![Group { targets: None, scheme }],
        skipped: parts(fields, &["ignore", "exclude_modules"])?,
        undone: Vec::new(),
    })
}

fn compressed(fields: &Fields) -> Result<Option<(Modules, Activations)>, ModelError> {
    for (key, format) in [("sparsity_config", "format"), ("transform_config", "config_groups")] {
        let Some(map) = fields.nullable(key, "an object", Value::as_object)? else { continue };
        match map.get(format) {
            None | Some(Value::Null) => {}
            Some(Value::String(format)) if format == "dense" => {}
            Some(Value::Object(groups)) if groups.is_empty() => {}
            Some(other) => return Err(fields.unsupported(key, other.to_string(), &["none"])),
        }
    }
    let whole = fields.nullable("format", "a string", Value::as_str)?;
    if whole == Some("dense") {
        return Ok(None);
    }
    let named = fields.required("config_groups", "an object", Value::as_object)?;
    let (mut groups, mut undone) = (Vec::new(), Vec::new());
    // Of each group of fp8 where it says so, if its rows are to become fp8.
    let mut of_fp8 = Vec::new();
    for (name, group) in named {
        let Some(map) = group.as_object() else {
            return Err(fields.error(&format!("config_groups.{name}"), "an object", group.to_string()));
        };
        let prefix = format!("{}config_groups.{name}.", fields.prefix());
        let group = fields.inside(prefix.as_str(), map);
        if let Some(weights) = group.nullable("weights", "an object", Value::as_object)? {
            let targets = group.required("targets", "a list of names", strings)?;
            let targets = patterns(&group, "targets", targets)?;
            let format = group.nullable("format", "a string", Value::as_str)?.or(whole);
            let prefix = format!("{prefix}weights.");
            let weights = fields.inside(prefix.as_str(), weights);
            let scheme = scheme(&group, &weights, format)?;
            let is_fp8 = matches!(scheme, Scheme::Bytes { .. })
                && weights.nullable("type", "a string", Value::as_str)? == Some("float");
            for key in ["input_activations", "output_activations"] {
                let is_asked_for = group.nullable(key, "an object", Value::as_object)?.is_some();
                let (is_input, place) = (key == "input_activations", format!("{}{key}", group.prefix()));
                let is_int8 = matches!(scheme, Scheme::Bytes { rows_become_int8: true, .. });
                if is_fp8 && is_input {
                    of_fp8.push(rows_become(&group, "float")?.then(|| place.clone()));
                }
                let is_done =
                    is_input && (is_int8 || matches!(of_fp8.last(), Some(Some(own)) if *own == place));
                if is_asked_for && !is_done {
                    undone.push(place);
                }
            }
            groups.push(Group { targets: Some(targets), scheme });
        }
    }
    let ignored = fields.nullable("ignore", "a list of names", strings)?.unwrap_or_default();
    // Rows become fp8 for all weights that are, or for none.
    let activations = match of_fp8.iter().all(Option::is_some) && !of_fp8.is_empty() {
        true => Activations::Fp8,
        false => {
            undone.extend(of_fp8.into_iter().flatten());
            Activations::AsGiven
        }
    };
    Ok(Some((Modules { groups, skipped: patterns(fields, "ignore", ignored)?, undone }, activations)))
}

fn patterns(fields: &Fields, key: &str, names: Vec<&str>) -> Result<Vec<Pattern>, ModelError> {
    let pattern = |name: &str| match name.strip_prefix("re:") {
        Some(pattern) => regex(fields, key, pattern),
        None if name == "Linear" => Ok(Pattern::Linear),
        None => Ok(Pattern::Exact(name.into())),
    };
    names.into_iter().map(pattern).collect()
}

/// A pattern that begins where the name does.
fn regex(fields: &Fields, key: &str, pattern: &str) -> Result<Pattern, ModelError> {
    let anchored = format!("^(?:{pattern})");
    match RegexBuilder::new(&anchored).unicode(false).size_limit(1 << 20).build() {
        Ok(regex) => Ok(Pattern::Regex(regex)),
        Err(_) => {
            Err(fields.unsupported(key, format!("{pattern:?}"), &["regular expressions without look-around"]))
        }
    }
}

/// The scheme of a group of compressed-tensors.
fn scheme(group: &Fields, weights: &Fields, format: Option<&str>) -> Result<Scheme, ModelError> {
    const FORMATS: &[&str] = &[
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
    ];
    let Some(format) = format else {
        return Err(group.error("format", "a string", "nothing".into()));
    };
    let bits = weights.required("num_bits", "a number of bits", Value::as_u64)?;
    let kind = weights.nullable("type", "a string", Value::as_str)?.unwrap_or("int");
    let strategy = weights.nullable("strategy", "a string", Value::as_str)?;
    let size = group_size(weights, "group_size")?;
    let unsupported = |value: String, supported| Err(weights.unsupported("num_bits", value, supported));
    match format {
        "pack-quantized" => {
            let bits = match (kind, bits) {
                ("int", 4) => 4,
                ("int", 8) => 8,
                _ => return unsupported(format!("{kind} of {bits}"), &["int of 4", "int of 8"]),
            };
            let size = match strategy {
                Some("group") => size,
                None | Some("channel") => None,
                Some(other) => {
                    return Err(weights.unsupported("strategy", other.into(), &["channel", "group"]));
                }
            };
            Ok(Scheme::Packed { bits, group: size, is_symmetric: weights.flag("symmetric")?.unwrap_or(true) })
        }
        "int-quantized" | "float-quantized" | "naive-quantized" => {
            if !matches!((kind, bits), ("int" | "float", 8)) {
                return unsupported(format!("{kind} of {bits}"), &["int of 8", "float of 8"]);
            }
            let block = match strategy {
                None | Some("tensor" | "channel") => None,
                Some("group") => Some([1, size.unwrap_or(usize::MAX >> 1)]),
                Some("block") => Some(block(weights, "block_structure")?.ok_or_else(|| {
                    weights.error("block_structure", "a list of two sizes", "nothing".into())
                })?),
                Some(other) => {
                    let supported = &["tensor", "channel", "group", "block"];
                    return Err(weights.unsupported("strategy", other.into(), supported));
                }
            };
            let rows_become_int8 = kind == "int" && block.is_none() && rows_become(group, kind)?;
            Ok(Scheme::Bytes { block, rows_become_int8 })
        }
        "nvfp4-pack-quantized" | "mxfp4-pack-quantized" => {
            let (scheme, group, name) = match format {
                "nvfp4-pack-quantized" => (Scheme::Nvfp4Packed, 16, "16"),
                _ => (Scheme::Mxfp4Packed, 32, "32"),
            };
            match size {
                Some(size) if size != group => Err(weights.unsupported(
                    "group_size",
                    size.to_string(),
                    if name == "16" { &["16"] } else { &["32"] },
                )),
                _ => Ok(scheme),
            }
        }
        other => Err(group.unsupported("format", other.into(), FORMATS)),
    }
}

/// Whether a group's rows become 8 bits of this kind, `int` or `float`, each by a scale that is found when it is there.
/// With scales of the file's own or in another way they are multiplied as they are.
fn rows_become(group: &Fields, kind: &str) -> Result<bool, ModelError> {
    let Some(map) = group.nullable("input_activations", "an object", Value::as_object)? else {
        return Ok(false);
    };
    let prefix = format!("{}input_activations.", group.prefix());
    let rows = group.inside(prefix.as_str(), map);
    let bits = rows.nullable("num_bits", "a number of bits", Value::as_u64)?;
    let text = |key| rows.nullable(key, "a string", Value::as_str);
    let is_dynamic = rows.nullable("dynamic", "true, false or a string", |value| match value {
        Value::Bool(is_dynamic) => Some(*is_dynamic),
        Value::String(_) => Some(false),
        _ => None,
    })?;
    Ok(bits == Some(8)
        && text("type")?.unwrap_or("int") == kind
        && text("strategy")? == Some("token")
        && is_dynamic == Some(true)
        && rows.flag("symmetric")?.unwrap_or(true))
}

#[cfg(test)]
mod tests {
    use host::ops::matmul::Activations;

    use super::super::tests::*;
    use super::super::*;

    /// What has a reader of its own is neither refused nor unread here; a method that it lacks is named.
    #[test]
    fn quantization_is_read_elsewhere() {
        let methods = r#""quantization_config": {"quant_method": "bitsandbytes"}"#;
        assert_eq!(qwen3(methods).unwrap(), qwen3("").unwrap());
        let text = format!(r#"{{"text_config": {{{methods}}}}}"#);
        let root = serde_json::from_str(&text).unwrap();
        assert_eq!(
            QuantConfig::read(&root, Path::new("config.json")).unwrap_err().to_string(),
            "config.json: text_config.quantization_config.quant_method: bitsandbytes is not supported; supported: fp8, gptq, \
             awq, mxfp4, compressed-tensors, modelopt"
        );
    }

    /// Rows become fp8 where every group of fp8 asks for it, by a scale that is found when a token is there; what is
    /// not done is named.
    #[test]
    fn rows_of_compressed_fp8() {
        let read = |groups: &[(&str, &str)]| {
            let group = |(index, (kind, rows)): (usize, &(&str, &str))| {
                let weights = format!(r#"{{"num_bits": 8, "type": "{kind}", "strategy": "channel"}}"#);
                format!(
                    r#""group_{index}": {{"targets": ["re:.*{index}"], "weights": {weights}, "input_activations": {rows}}}"#
                )
            };
            let groups: Vec<String> = groups.iter().enumerate().map(group).collect();
            let text = format!(
                r#"{{"quantization_config": {{"quant_method": "compressed-tensors", "format": "naive-quantized",
                   "config_groups": {{{}}}}}}}"#,
                groups.join(", ")
            );
            let root = serde_json::from_str(&text).unwrap();
            let config = QuantConfig::read(&root, Path::new("config.json")).unwrap().unwrap();
            (config.activations(), config.undone().to_vec())
        };
        let place =
            |index: usize| format!("quantization_config.config_groups.group_{index}.input_activations");
        let of = |kind: &str, strategy: &str, dynamic: bool| {
            format!(r#"{{"num_bits": 8, "type": "{kind}", "strategy": "{strategy}", "dynamic": {dynamic}}}"#)
        };
        let (token, fixed) = (of("float", "token", true), of("float", "tensor", false));
        let int8 = of("int", "token", true);
        let given = Activations::AsGiven;
        assert_eq!(read(&[("float", &token)]), (Activations::Fp8, vec![]));
        assert_eq!(read(&[("float", &token), ("float", &token)]), (Activations::Fp8, vec![]));
        assert_eq!(read(&[("float", &token), ("int", &int8)]), (Activations::Fp8, vec![]));
        assert_eq!(read(&[("float", "null")]), (given, vec![]));
        assert_eq!(read(&[("float", &fixed)]), (given, vec![place(0)]));
        assert_eq!(read(&[("float", &token), ("float", &fixed)]), (given, vec![place(1), place(0)]));
        assert_eq!(read(&[("float", &token), ("float", "null")]), (given, vec![place(0)]));
        assert_eq!(read(&[("int", &token)]), (given, vec![place(0)]));
    }
}
