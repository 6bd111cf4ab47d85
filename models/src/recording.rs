//! Work that is the same each time but for what it reads from device memory: recorded once, then launched as a graph.

use host::{Device, Error, Graph, Place, Stream};

/// The work is run once as it is, so that everything that is lazy has happened, and recorded the next time.
#[derive(Debug)]
pub(super) enum Recording {
    NotRun,
    RunOnce,
    Graph(Graph),
    /// Where there are no graphs.
    Never,
}

impl Recording {
    /// Nothing yet.
    pub(super) fn new(device: &Device) -> Self {
        if matches!(device.place(), Place::Cuda(_)) { Recording::NotRun } else { Recording::Never }
    }

    /// Puts the work into the stream, by `enqueue` or as a graph.
    ///
    /// # Safety
    /// - What `enqueue` uses, tensors and plans, is the same at each call, and lives as long as the stream has work of
    /// it.
    /// - Nothing but `stream` uses it meanwhile, and all calls are for the same stream.
    pub(super) unsafe fn run(
        &mut self,
        stream: &Stream,
        enqueue: impl FnOnce(&Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Recording::Never => enqueue(stream)?,
            Recording::NotRun => {
                enqueue(stream)?;
                *self = Recording::RunOnce;
            }
            Recording::RunOnce => {
                let graph = stream.capture(enqueue)?;
                // SAFETY: as below.
                unsafe { graph.launch(stream)? };
                *self = Recording::Graph(graph);
            }
            // SAFETY: the caller's promise.
            Recording::Graph(graph) => unsafe { graph.launch(stream)? },
        }
        Ok(())
    }
}
