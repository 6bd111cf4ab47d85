//! A model: its configuration and its weights on a device.

use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use abi::DType;

use super::config::DecoderConfig;
use super::decoder::Decoder;
use super::error::{Excerpt, list};
use super::layers::Adapters;
use super::loader::{Listed, LoadProgress, Loader, Quantise};
use super::part::{Part, Shard};
use super::{
    Adapter, Batch, BatchError, BatchOptions, Checkpoint, ModelConfig, Session, SessionOptions, VisionTower,
};
use host::Device;
use host::Error;
use host::Stream;
use host::group::Communicator;
use host::ops::matmul::Activations;

/// A model on a device. Cheap to clone; the weights are shared and never written.
#[derive(Clone, Debug)]
pub struct Model {
    device: Device,
    config: Arc<ModelConfig>,
    decoder: Arc<Decoder>,
    tower: Option<Arc<VisionTower>>,
    dtype: DType,
    activations: Activations,
    report: Arc<LoadReport>,
    /// Of a group, which has the model together; and what of the decoder is here then.
    rank: Option<(Communicator, Arc<DecoderConfig>)>,
}

/// What of a model's files was not used, or not as it is there. Its text is a line, with the first names of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// [`ModelConfig::unread_keys`]; and what a `quantization_config` says of the rows that weights are multiplied
    /// with, where they are multiplied as they are.
    pub unread_keys: Vec<String>,
    /// Tensors of the checkpoint that the model has no place for, by name.
    pub unused_tensors: Vec<String>,
    /// Tensors that the checkpoint has quantised and the device has as floats, though nobody asked for that: no kernel
    /// has a layout for them or for this part of them, or what they are for takes floats alone.
    pub dequantised_tensors: Vec<String>,
}

impl LoadReport {
    /// Whether all was used, as it is.
    pub fn is_empty(&self) -> bool {
        self.unread_keys.is_empty() && self.unused_tensors.is_empty() && self.dequantised_tensors.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 4;
        let mut separator = "";
        for (what, names) in [
            ("keys of config.json", &self.unread_keys),
            ("tensors", &self.unused_tensors),
            ("quantised tensors, which became floats", &self.dequantised_tensors),
        ] {
            if !names.is_empty() {
                let shown = list(names.iter().map(|name| Excerpt(name)), (names.len(), MOST), ", ");
                write!(f, "{separator}{} {what} ({shown})", names.len())?;
                separator = ", ";
            }
        }
        if separator.is_empty() { f.write_str("nothing") } else { Ok(()) }
    }
}

impl Model {
    /// Loads a folder with `config.json` and safetensors, or a GGUF file, with the weights converted to `dtype`; those
    /// of projections that are quantised stay so ([`Quantise::AsStored`]).
    ///
    /// `progress` is called as tensors arrive on the device. **Errors**: [`crate::ModelError`] for what is wrong
    /// with the files, all missing tensors at once; [`Error::OutOfMemory`].
    pub fn load(
        device: &Device,
        path: &Path,
        dtype: DType,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, Error> {
        Self::from_checkpoint(device, &Checkpoint::open(path)?, dtype, progress)
    }

    /// The same of files that are open.
    pub fn from_checkpoint(
        device: &Device,
        checkpoint: &Checkpoint,
        dtype: DType,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, Error> {
        Self::quantised(device, checkpoint, dtype, Quantise::AsStored, progress)
    }

    /// The same with the weights of projections dequantised, or quantised as they are loaded.
    pub fn quantised(
        device: &Device,
        checkpoint: &Checkpoint,
        dtype: DType,
        quantise: Quantise,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, Error> {
        let mut go_on = |so_far| {
            progress(so_far);
            ControlFlow::Continue(())
        };
        Self::quantised_while(device, checkpoint, dtype, quantise, &mut go_on)
    }

    /// The same for as long as `progress` says so: a [`ControlFlow::Break`] ends the loading with
    /// [`crate::ModelError::Stopped`], and the memory of what has been loaded is given back.
    pub fn quantised_while(
        device: &Device,
        checkpoint: &Checkpoint,
        dtype: DType,
        quantise: Quantise,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Self, Error> {
        Self::load_part((device, None), checkpoint, dtype, quantise, progress)
    }

    /// A rank's part of a model that the ranks of a group have together: all of them load the same files, and then
    /// make the same calls. Each has its share of the heads of attention and delta nets, of the columns of gated MLPs
    /// and of every expert, and of the tokens of the head; of the files it reads that alone. The results are the same
    /// at all ranks.
    ///
    /// A quantised weight that would be cut inside of a group of columns is dequantised; where a block of rows is cut,
    /// each row has its scale by itself. `rank` is the rank, or it with experts that are shared as a whole
    /// ([`Shard::with_experts`]), which all ranks must say alike.
    ///
    /// **Errors**: as [`Model::quantised_while`].
    pub fn of_rank<'a>(
        rank: impl Into<Shard<'a>>,
        checkpoint: &Checkpoint,
        dtype: DType,
        quantise: Quantise,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Self, Error> {
        let shard = rank.into();
        Self::load_part((shard.rank.device(), Some(shard)), checkpoint, dtype, quantise, progress)
    }

    fn load_part(
        (device, shard): (&Device, Option<Shard<'_>>),
        checkpoint: &Checkpoint,
        dtype: DType,
        quantise: Quantise,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Self, Error> {
        #[cfg(feature = "tracing")]
        let _span = {
            let (device, dtype) = (device.describe(), dtype.name());
            tracing::info_span!(target: "warpforge", "load_model", device, dtype, ?quantise).entered()
        };
        let config = checkpoint.config().clone();
        check(&config, dtype)?;
        check_tables(shard.is_some(), quantise)?;
        let part = match &shard {
            Some(shard) => shard.part(checkpoint.unit(quantise)?),
            None => Part::WHOLE,
        };
        let stream = device.stream()?;
        let build = |loader: &mut Loader<'_>| build(&config, loader);
        let (parts, dequantised_tensors) =
            Loader::from_checkpoint(checkpoint, (&stream, part), (dtype, quantise), progress, build)?;
        stream.synchronize()?;
        let unused_tensors = checkpoint.unused_tensors();
        let unread_keys = [config.unread_keys.clone(), checkpoint.undone_keys()].concat();
        let report = LoadReport { unread_keys, unused_tensors, dequantised_tensors };
        #[cfg(feature = "tracing")]
        tracing::info!(
            target: "warpforge",
            unread_keys = report.unread_keys.len(),
            unused_tensors = report.unused_tensors.len(),
            dequantised_tensors = report.dequantised_tensors.len(),
            "loaded a model"
        );
        let (report, activations) = (Arc::new(report), checkpoint.activations());
        Ok(Self { report, activations, ..Self::new((device, shard), part, config, parts, dtype) })
    }

    /// A model of this configuration with random weights, to measure or test what has no checkpoint at hand.
    ///
    /// **Errors**: those of [`ModelConfig::check`], and [`Error::Invalid`] for a type that is no float.
    pub fn random(device: &Device, config: ModelConfig, dtype: DType, seed: u64) -> Result<Self, Error> {
        Self::random_quantised(device, config, dtype, Quantise::Dense, seed)
    }

    /// The same with projections and experts, and perhaps tables, in the layout of a scheme ([`Quantise::By`],
    /// [`Quantise::WithTables`]); each of their codes is as likely as the others.
    ///
    /// **Errors**: as [`Model::random`], and [`Error::Invalid`] for a scheme whose layout kernels cannot take.
    pub fn random_quantised(
        device: &Device,
        config: ModelConfig,
        dtype: DType,
        quantise: Quantise,
        seed: u64,
    ) -> Result<Self, Error> {
        Self::random_part((device, None), config, dtype, quantise, seed)
    }

    /// The same as a rank's part of it: see [`Model::of_rank`]. What all ranks have is the same at all of them.
    pub fn random_of_rank<'a>(
        rank: impl Into<Shard<'a>>,
        config: ModelConfig,
        dtype: DType,
        quantise: Quantise,
        seed: u64,
    ) -> Result<Self, Error> {
        let shard = rank.into();
        Self::random_part((shard.rank.device(), Some(shard)), config, dtype, quantise, seed)
    }

    fn random_part(
        (device, shard): (&Device, Option<Shard<'_>>),
        config: ModelConfig,
        dtype: DType,
        quantise: Quantise,
        seed: u64,
    ) -> Result<Self, Error> {
        check(&config, dtype)?;
        check_tables(shard.is_some(), quantise)?;
        let part = shard.map_or(Part::WHOLE, |shard| shard.part(quantise.unit()));
        let stream = device.stream()?;
        let parts =
            Loader::random(seed, (&stream, part), (dtype, quantise), |loader| build(&config, loader))?;
        stream.synchronize()?;
        Ok(Self::new((device, shard), part, config, parts, dtype))
    }

    /// Names and shapes of the tensors that a model of this configuration takes from a checkpoint, experts one by one.
    ///
    /// **Errors**: those of [`ModelConfig::check`].
    pub fn tensors(config: &ModelConfig) -> Result<Vec<(String, Vec<usize>)>, Error> {
        Ok(Self::listed(config)?.tensors)
    }

    /// The same, with the names of what [`Quantise::By`] quantises.
    pub(super) fn listed(config: &ModelConfig) -> Result<Listed, Error> {
        config.check()?;
        Loader::list(&Device::cpu().stream()?, DType::BF16, |loader| build(config, loader))
    }

    fn new(
        (device, shard): (&Device, Option<Shard<'_>>),
        part: Part,
        config: ModelConfig,
        (decoder, tower): (Decoder, Option<VisionTower>),
        dtype: DType,
    ) -> Self {
        let (decoder, tower) = (Arc::new(decoder), tower.map(Arc::new));
        let report = Arc::default();
        let own = shard
            .map(|shard| shard.rank)
            .filter(|rank| rank.size() > 1)
            .map(|rank| (rank.clone(), Arc::new(part.of(&config.decoder))));
        let (config, activations) = (Arc::new(config), Activations::AsGiven);
        Model { device: device.clone(), config, decoder, tower, dtype, activations, report, rank: own }
    }

    /// The same model, of whose products with packed fp8 weights the rows may become fp8 or not: for one with random
    /// weights. Loaded, a model does what its checkpoint says, or [`Checkpoint::with_activations`] instead.
    #[must_use]
    pub fn with_activations(self, activations: Activations) -> Self {
        Model { activations, ..self }
    }

    /// What becomes of rows before products with fp8 weights.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// The rank that it is a part at, if there are others.
    pub fn rank(&self) -> Option<&Communicator> {
        self.rank.as_ref().map(|(rank, _)| rank)
    }

    /// What of the decoder is here.
    pub(super) fn own_decoder(&self) -> &DecoderConfig {
        self.rank.as_ref().map_or(&self.config.decoder, |(_, own)| own)
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its weights.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    pub(super) fn decoder_mut(&mut self) -> &mut Arc<Decoder> {
        &mut self.decoder
    }

    /// Those of its vision tower, if it has one.
    pub fn tower(&self) -> Option<&VisionTower> {
        self.tower.as_deref()
    }

    /// What of its files was not used, or not as it is there.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A session: caches and buffers for a batch of sequences, and the planned operators.
    pub fn session(&self, options: SessionOptions) -> Result<Session, Error> {
        Session::new(self.clone(), options)
    }

    /// A batch: caches in pages for sequences that come and go, buffers, and the planned operators.
    pub fn batch(&self, options: BatchOptions) -> Result<Batch, BatchError> {
        Batch::new(self.clone(), options, &[])
    }

    /// The same whose sequences may have adapters, each one of these by its place ([`crate::Prompt::adapter`]).
    /// Adapters are copied to the device, in the type of the model.
    ///
    /// What a sequence with an adapter computes is what the model computes with the adapter added to its weights,
    /// within rounding: here the weights stay as they are, also quantised ones, and
    /// `scale · (x · Aᵀ) · Bᵀ` is added to the products. Steps with such sequences run both products of each
    /// projection that some adapter changes, for the rows of adapters alone, and gate and up apart from their
    /// activation. All adapters of a batch are of the rank of the largest, filled up with zeros.
    ///
    /// **Errors**: those of [`Model::batch`]; [`crate::ModelError::Tensors`] for an adapter's tensors that do not fit,
    /// or are of parts of the model that adapters cannot change; [`Error::Invalid`] for a model that the ranks of a
    /// group have together.
    pub fn batch_with(&self, options: BatchOptions, adapters: &[&Adapter]) -> Result<Batch, BatchError> {
        Batch::new(self.clone(), options, adapters)
    }

    /// Adapters, on the device.
    pub(super) fn adapters(&self, stream: &Stream, adapters: &[&Adapter]) -> Result<Adapters, Error> {
        if self.rank.is_some() {
            let (expected, got) = ("none of a model that ranks have together", adapters.len().to_string());
            return Err(Error::invalid("Batch", "adapters", expected, got));
        }
        let prefix = self.config.architecture.decoder_prefix();
        let decoder = (&self.config.decoder, &self.decoder.layers[..], prefix);
        Adapters::new(stream, decoder, self.dtype, adapters)
    }
}

/// Whether a model can be built.
fn check(config: &ModelConfig, dtype: DType) -> Result<(), Error> {
    if !DType::FLOATS.contains(&dtype) {
        let expected = "weights and activations in f32, f16 or bf16";
        return Err(Error::invalid("Model", "dtype", expected, dtype.name()));
    }
    config.check()
}

/// Ranks share the rows of a head anywhere, also inside of a block.
fn check_tables(is_shared: bool, quantise: Quantise) -> Result<(), Error> {
    match quantise {
        Quantise::WithTables { tables, .. } if is_shared && tables.rows > 1 => {
            let expected = "tables by a scheme with a scale for each row, where ranks of a group share them";
            Err(Error::invalid("Model", "quantise", expected, format!("blocks of {} rows", tables.rows)))
        }
        _ => Ok(()),
    }
}

/// All weights of a model.
fn build(config: &ModelConfig, loader: &mut Loader<'_>) -> Result<(Decoder, Option<VisionTower>), Error> {
    let decoder = Decoder::new(&config.decoder, loader, config.architecture.decoder_prefix())?;
    let tower = config.vision.as_ref().map(|vision| VisionTower::new(vision, loader)).transpose()?;
    Ok((decoder, tower))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_stops_where_it_is_told_to() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3");
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let device = Device::cpu();
        let load = |most: usize| {
            let mut told = Vec::new();
            let mut progress = |so_far: LoadProgress| {
                told.push(so_far);
                if told.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let model =
                Model::quantised_while(&device, &checkpoint, DType::F32, Quantise::Dense, &mut progress);
            (model, told)
        };
        let (model, all) = load(usize::MAX);
        assert!(model.is_ok() && all.len() > 3);
        assert!(all.windows(2).all(|pair| pair[0].loaded_bytes < pair[1].loaded_bytes));
        for most in [1, 3, all.len()] {
            let (model, told) = load(most);
            assert_eq!(told, all[..most]);
            let last = all[most - 1];
            let expected =
                format!("loading was stopped after {} of {} bytes", last.loaded_bytes, last.total_bytes);
            assert_eq!(model.unwrap_err().to_string(), expected);
        }
    }
}

#[cfg(all(test, feature = "tracing"))]
mod trace {
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Notes where spans begin and end, and events.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<Vec<String>>>);

    impl Notes {
        fn note(&self, what: &str) {
            self.0.lock().unwrap().push(what.to_owned());
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "warpforge"
        }
        fn new_span(&self, span: &Attributes<'_>) -> Id {
            self.note(span.metadata().name());
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let has_bytes = event.metadata().fields().field("loaded_bytes").is_some();
            self.note(if has_bytes { "progress" } else { "other" });
        }
        fn enter(&self, _: &Id) {
            self.note("enter");
        }
        fn exit(&self, _: &Id) {
            self.note("exit");
        }
    }

    #[test]
    fn a_load_is_a_span_with_its_progress() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3");
        let (notes, mut told) = (Notes::default(), 0);
        tracing::subscriber::with_default(notes.clone(), || {
            Model::load(&Device::cpu(), &folder, DType::F32, &mut |_| told += 1).unwrap();
        });
        let notes = notes.0.lock().unwrap();
        assert_eq!(notes[..2], ["load_model", "enter"]);
        assert_eq!(notes.iter().filter(|note| *note == "progress").count(), told);
        assert_eq!(notes[notes.len() - 2..], ["other", "exit"]);
    }
}
