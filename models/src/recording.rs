//! Work that is the same each time but for what it reads from device memory: recorded once, then launched as a graph.

use host::{Device, Error, Fallback, Graph, Place, Stream};

/// The work is run once as it is, so that everything that is lazy has happened, and recorded the next time.
#[derive(Debug)]
pub(super) enum Recording {
    NotRun,
    RunOnce,
    Graph(Graph),
    /// Where there are no graphs, or a part of the work has fallen back to the CPU.
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
    ///   it.
    /// - Nothing but `stream` uses it meanwhile, and all calls are for the same stream.
    pub(super) unsafe fn run(
        &mut self,
        stream: &Stream,
        mut enqueue: impl FnMut(&Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Recording::Never => enqueue(stream)?,
            Recording::NotRun => {
                enqueue(stream)?;
                *self = Recording::RunOnce;
            }
            Recording::RunOnce => {
                match stream.capture(&mut enqueue) {
                    Ok(graph) => {
                        // SAFETY: as below.
                        unsafe { graph.launch(stream)? };
                        *self = Recording::Graph(graph);
                    }
                    // Nothing of it has run.
                    Err(Error::Unsupported { .. }) if stream.device().fallback() == Fallback::Cpu => {
                        *self = Recording::Never;
                        enqueue(stream)?;
                    }
                    Err(error) => return Err(error),
                }
            }
            // SAFETY: the caller's promise.
            Recording::Graph(graph) => unsafe { graph.launch(stream)? },
        }
        Ok(())
    }
}
