# fish completion for klimax
function __klimax_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answer (klimax __complete $words[2..-1] 2>/dev/null)
    if test "$answer" = ':files'
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $answer
    end
end
complete -c klimax -f -a '(__klimax_complete)'
